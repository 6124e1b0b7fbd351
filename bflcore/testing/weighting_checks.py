"""Checks of weightings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bflcore.messages import Broadcast
from bflcore.posteriors import Posterior
from bflcore.testing import problems
from bflcore.testing.surroundings import undisturbed
from bflcore.weighting import Weighting, check_weights

__all__ = ["checks_of"]

Part = type[Weighting]


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:
    """Yield the checks of a weighting."""
    yield from (inputs_stay_untouched, leaves_the_process_as_it_was)
    yield from (weights_make_sense, order_is_carried_through, identical_clients_weigh_the_same)
    if part.local:
        yield a_client_is_weighed_alone


def inputs_stay_untouched(part: Part) -> None:
    """Weighing leaves posteriors, examples and broadcast as they were."""
    for posteriors, examples, broadcast in _cases(part):
        before = problems.copies(posteriors, {"n": examples}, broadcast)
        part().weigh(posteriors, examples, broadcast)
        for thing, copy in zip((posteriors, {"n": examples}, broadcast), before, strict=True):
            problems.assert_same(thing, copy, "an input was changed in place", 0.0)


def leaves_the_process_as_it_was(part: Part) -> None:
    """Weighing prints nothing, and changes no global generator or setting of torch."""
    for posteriors, examples, broadcast in _cases(part):
        with undisturbed("weighing"):
            part().weigh(posteriors, examples, broadcast)


def weights_make_sense(part: Part) -> None:
    """Weights are finite and >= 0, one per client, in float64, and not all zero."""
    for posteriors, examples, broadcast in _cases(part):
        weights = part().weigh(posteriors, examples, broadcast)
        if weights.dtype != torch.float64:
            raise AssertionError(
                f"weights are {weights.dtype}, not float64; return weights.double()"
            )
        check_weights(weights, len(examples))


def order_is_carried_through(part: Part) -> None:
    """Clients in another order have the same weights, in that order."""
    order = [2, 0, 1]
    for posteriors, examples, broadcast in _cases(part):
        there = _shares(part, posteriors[order], examples[order], broadcast)
        here = _shares(part, posteriors, examples, broadcast)
        problems.assert_same(
            {"w": there}, {"w": here[order]}, "weights of clients in another order"
        )


def identical_clients_weigh_the_same(part: Part) -> None:
    """Identical posteriors with equally many examples have equal weights."""
    for posteriors, examples, broadcast in _cases(part):
        found = _shares(part, posteriors[[0, 0, 0]], examples[[0, 0, 0]], broadcast)
        problems.assert_same(
            {"w": found}, {"w": torch.full((3,), 1 / 3).double()}, "shares of the same", 1e-6
        )


def a_client_is_weighed_alone(part: Part) -> None:
    """A `local` weighting gives a client the same weight in any cohort."""
    for posteriors, examples, broadcast in _cases(part):
        together = part().weigh(posteriors, examples, broadcast)
        alone = torch.cat(
            [part().weigh(posteriors[[k]], examples[[k]], broadcast) for k in range(3)]
        )
        problems.assert_same(
            {"w": alone},
            {"w": together},
            "weights of clients alone, compared with all together "
            "(declare local = False where they differ)",
        )


def _shares(part: Part, posteriors: Posterior, examples: Tensor, broadcast: Broadcast) -> Tensor:
    weights = part().weigh(posteriors, examples, broadcast).double()
    return weights / weights.sum()


def _cases(part: Part) -> Iterator[tuple[Posterior, Tensor, Broadcast]]:
    layout = problems.separable().layout
    for family in problems.families(part):
        posteriors = family.arbitrary(layout, 3, problems.generator(0))
        server = family.arbitrary(layout, 1, problems.generator(1))[0]
        yield posteriors, torch.tensor([9, 6, 3]), Broadcast(1, server, server)
