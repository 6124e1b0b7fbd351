"""Checks of hyperparameter updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from bflcore.aggregation import Statistics
from bflcore.hyper import HyperUpdate
from bflcore.inference.base import LocalInference
from bflcore.messages import Broadcast, LocalResult
from bflcore.posteriors import Posterior
from bflcore.testing import problems
from bflcore.testing.surroundings import undisturbed

__all__ = ["checks_of"]

Part = type[HyperUpdate]

WEIGHTS = torch.tensor([9.0, 6.0, 3.0], dtype=torch.float64)


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:
    """Yield the checks of a hyperparameter update."""
    yield from (inputs_stay_untouched, leaves_the_process_as_it_was)
    yield from (rounds_are_counted, the_next_broadcast_is_valid, summaries_add_up)
    if "monotone" in part.tags:
        yield the_objective_never_falls
    if "carries-posterior" in part.tags:
        yield the_posterior_is_the_next_prior


def inputs_stay_untouched(part: Part) -> None:
    """Summarising and updating leave results, weights and broadcast as they were."""
    for broadcast, result, fused in _cases(part):
        things = (broadcast, result, fused, {"weights": WEIGHTS})
        before = problems.copies(*things)
        _updated(part, broadcast, result, fused)
        for thing, copy in zip(things, before, strict=True):
            problems.assert_same(thing, copy, "an input was changed in place", 0.0)


def leaves_the_process_as_it_was(part: Part) -> None:
    """Updating prints nothing, and changes no global generator or setting of torch."""
    broadcast, result, fused = next(_cases(part))
    with undisturbed("updating"):
        _updated(part, broadcast, result, fused)


def rounds_are_counted(part: Part) -> None:
    """The next broadcast is that of the next round."""
    for broadcast, result, fused in _cases(part):
        following = _updated(part, broadcast, result, fused)
        if following.round != broadcast.round + 1:
            raise AssertionError(
                f"after round {broadcast.round} comes {following.round}; return a Broadcast of "
                "broadcast.round + 1"
            )


def the_next_broadcast_is_valid(part: Part) -> None:
    """Start and prior keep family, shapes and dtype, and are valid."""
    for broadcast, result, fused in _cases(part):
        following = _updated(part, broadcast, result, fused)
        for name in ("start", "prior"):
            found: Posterior = getattr(following, name)
            if reason := found.invalid():
                raise AssertionError(f"the next {name}: {reason}")
            wanted: Posterior = getattr(broadcast, name)
            if type(found) is not type(wanted) or problems.shapes(found) != problems.shapes(wanted):
                raise AssertionError(
                    f"the next {name} is {found.name} {problems.shapes(found)}, not {wanted.name} "
                    f"{problems.shapes(wanted)}"
                )


def summaries_add_up(part: Part) -> None:
    """The sum of the clients' summaries is the summary of all clients."""
    for broadcast, result, _ in _cases(part):
        together = part().summarise(result, WEIGHTS, broadcast)
        what = "clients' own summaries added up, compared with the summary of all"
        problems.assert_same(_summed(part, broadcast, result), together, what)


def the_objective_never_falls(part: Part) -> None:
    """sum_k w_k KL(q_k || prior) is no larger under the next prior than under the last."""
    for broadcast, result, fused in _cases(part):
        following = _updated(part, broadcast, result, fused)
        before, after = (
            float((WEIGHTS * _divergence(result.posterior, prior)).sum())
            for prior in (broadcast.prior, following.prior)
        )
        if not after <= before + 1e-9 * abs(before):
            raise AssertionError(f"the expected divergence rises from {before:.9g} to {after:.9g}")


def the_posterior_is_the_next_prior(part: Part) -> None:
    """The fused posterior comes back as start and prior, but for variances of zero in the prior."""
    for broadcast, result, fused in _cases(part):
        following = _updated(part, broadcast, result, fused)
        problems.assert_same(following.start, fused, "the next start", 0.0)
        known = fused.pack().get("variance", torch.ones_like(fused.mean)) > 0
        prior, wanted = (
            {n: t[known] if t.shape == known.shape else t for n, t in one.pack().items()}
            for one in (following.prior, fused)
        )
        problems.assert_same(prior, wanted, "the next prior", 0.0)


def _divergence(posteriors: Posterior, prior: Posterior) -> Tensor:
    clients = len(posteriors.mean)
    return posteriors.kl(prior.map(lambda tensor: tensor.expand(clients, -1))).double()


def _updated(part: Part, broadcast: Broadcast, result: LocalResult, fused: Posterior) -> Broadcast:
    return part().update(broadcast, fused, _summed(part, broadcast, result))


def _summed(part: Part, broadcast: Broadcast, result: LocalResult) -> Statistics:
    each = [
        part().summarise(result.select([k]), WEIGHTS[k : k + 1], broadcast)
        for k in range(len(WEIGHTS))
    ]
    return reduce(lambda left, right: {n: left[n] + right[n] for n in left}, each)


def _cases(part: Part) -> Iterator[tuple[Broadcast, LocalResult, Posterior]]:
    """Yield the server's data after a round of clients, for each inference that fits."""
    for inference in _inferences(part):
        broadcast, result = deepcopy(_fitted(inference))  # a wrong part may change its own
        yield broadcast, result, result.posterior[0]


@lru_cache(maxsize=32)
def _fitted(inference: LocalInference) -> tuple[Broadcast, LocalResult]:
    of = problems.surveyed(inference, problems.separable())
    broadcast = problems.first_broadcast(inference, of)
    return broadcast, inference.fit(of, broadcast, problems.cohort(of, inference))


def _inferences(part: Part) -> list[Any]:
    """Return the inferences of the methods that use this update; without any, all that fit."""
    methods = [m for m in problems.companions(part, "method") if type(m.hyper) is part]
    found = sorted({type(m.inference) for m in methods}, key=lambda inference: inference.name)
    candidates = found or problems.companions(part, "inference")
    fitting = [i for i in candidates if not part.families or i.family in part.families]
    if not fitting:  # nothing to check would look like nothing wrong
        raise AssertionError(
            f"families are {part.families}, which no inference of its methods gives: "
            f"{', '.join(f'{i.name} ({i.family})' for i in candidates)}"
        )
    return [problems.build(inference) for inference in fitting]
