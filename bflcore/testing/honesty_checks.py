"""Checks of local inferences: what the figures of a run rely on.

No test sample is trained on, predictions are of each sample alone, random numbers follow the run's
seed, the loss is what it says, and nothing that others use is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bflcore.inference.base import LocalInference
from bflcore.messages import Broadcast, Cohort
from bflcore.problem.base import Problem
from bflcore.testing import problems
from bflcore.testing.surroundings import undisturbed

__all__ = ["checks_of", "predicted"]

Part = type[LocalInference]

FACTOR = 4  # the loss of a round may differ this much from those before and after it


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:  # noqa: ARG001 - as of all kinds
    """Yield the checks that concern trust."""
    yield from (test_samples_are_never_read, predictions_are_of_each_sample_alone)
    yield from (fits_follow_seed_and_round, predictions_follow_seed_and_round)
    yield loss_is_the_mean_per_sample
    yield from (results_are_detached, leaves_the_process_as_it_was)


def test_samples_are_never_read(part: Part) -> None:
    """`survey`, `fit`, `personalise` and `predict` give the same whatever the test samples are."""
    inference, of, broadcast = _case(part)
    spoilt = attrs.evolve(of.test, x=torch.full_like(of.test.x, torch.nan), y=(of.test.y + 1) % 3)
    found, expected = (
        _everything(inference, attrs.evolve(of, test=test), broadcast) for test in (spoilt, of.test)
    )
    for name, result in expected.items():
        problems.assert_same(
            found[name],
            result,
            f"{name} with other test samples (train on cohort.x and cohort.y alone)",
            0.0,
        )


def predictions_are_of_each_sample_alone(part: Part) -> None:
    """The prediction of a sample does not depend on the samples that are predicted with it."""
    inference, of, broadcast = _case(part)
    cohort = _fitted(inference, of, broadcast)
    x = torch.stack([of.train.of(client)[0][:3] for client in cohort.clients])
    x = torch.cat([x, 3 * x.flip(1) + 1], dim=1)
    whole = predicted(inference, of, broadcast, cohort, x)
    for what, rows in (
        ("the first half of a block", [0, 1, 2]),
        ("the second half of a block", [3, 4, 5]),
        ("a block in another order", [4, 2, 0, 5, 1, 3]),
        ("one sample", [2]),
    ):
        found = predicted(inference, of, broadcast, cohort, x[:, rows])
        problems.assert_same(
            {"draws": found},
            {"draws": whole[:, :, rows]},
            f"predictions of {what}, compared with those of the whole block (each sample must be "
            "predicted by itself, with the same parameter draws)",
            1e-7,
        )


def fits_follow_seed_and_round(part: Part) -> None:
    """Where `fit` draws random numbers, another seed or round gives another result."""
    inference, of, broadcast = _case(part)

    def fit(of: Problem, round: int) -> Any:
        return inference.fit(of, broadcast, problems.cohort(of, inference, round=round))

    _differs("fit", of, fit)


def predictions_follow_seed_and_round(part: Part) -> None:
    """Where `predict` draws random numbers, another seed or round gives another result."""
    inference, of, broadcast = _case(part)
    cohort = _fitted(inference, of, broadcast)

    def predict(of: Problem, round: int) -> Any:
        following = attrs.evolve(cohort, seed=of.seed, round=round)
        return {"draws": predicted(inference, of, broadcast, following)}

    _differs("predict", of, predict)


def _differs(name: str, of: Problem, work: Callable[[Problem, int], Any]) -> None:
    with _Draws() as draws:  # type: ignore[no-untyped-call]
        first = work(of, 0)
    if not draws.seen:
        return
    others = {"seed": work(attrs.evolve(of, seed=of.seed + 1), 0), "round": work(of, 1)}
    for what, other in others.items():
        if not problems.difference(first, other):
            raise AssertionError(
                f"{name} draws random numbers, but gives the same with another {what}: the "
                f"spread over {what}s would be too small; draw from cohort.streams(...)"
            )


def loss_is_the_mean_per_sample(part: Part) -> None:
    """`LocalResult.loss` is a mean negative log likelihood in nats per sample.

    It is compared with that of the training samples before and after the round, by `predict`.
    """
    inference = problems.build(part)
    of = problems.surveyed(inference, problems.separable(sizes=(24,), sharing="body"))
    broadcast, cohort = problems.first_broadcast(inference, of), problems.cohort(of, inference)
    result = inference.fit(of, broadcast, cohort)
    after = attrs.evolve(broadcast, start=result.posterior[0])
    before, later = (
        _nll(inference, of, sent, attrs.evolve(cohort, memory=memory))
        for sent, memory in ((broadcast, cohort.memory), (after, result.memory))
    )
    loss = float(result.loss[0])
    low, high = min(before, later) / FACTOR - 0.05, max(before, later) * FACTOR + 0.05
    if not low <= loss <= high:
        raise AssertionError(
            f"LocalResult.loss is {loss:.4g}, but the samples' mean negative log likelihood is "
            f"{before:.4g} before and {later:.4g} after the round; return the mean over the "
            "samples and the steps, in nats"
        )


def results_are_detached(part: Part) -> None:
    """No tensor that an inference returns requires grad: other processes cannot be sent one."""
    inference, of, broadcast = _case(part)
    given = _everything(inference, of, broadcast)
    given |= {"initial": inference.initial(of), "prior": inference.prior(of)}
    for name, thing in given.items():
        for field, tensor in problems.tensors(thing).items():
            if tensor.requires_grad:
                raise AssertionError(
                    f"{name} returns {field or 'a tensor'} that requires grad; return it detached "
                    "(.detach())"
                )


def leaves_the_process_as_it_was(part: Part) -> None:
    """Nothing is printed, and no global generator or setting of torch is changed."""
    inference, of, broadcast = _case(part)
    with undisturbed("the inference"):
        _everything(inference, of, broadcast)


def predicted(
    inference: LocalInference,
    of: Problem,
    broadcast: Broadcast,
    cohort: Cohort,
    x: Tensor | None = None,
) -> Tensor:
    """Return the draws ``[K, S, B, C]`` for `x` ``[K, B, ...]`` (default: three training samples).

    A closed form is one more draw.
    """
    if x is None:
        x = torch.stack([of.train.of(client)[0][:3] for client in cohort.clients])
    found = inference.predict(of, broadcast, cohort, x)
    if found.closed_form is None:
        return found.draws
    return torch.cat([found.draws, found.closed_form[:, None]], dim=1)


class _Draws(TorchDispatchMode):
    """Notes whether any random number is drawn with torch, from whatever generator."""

    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _case(part: Part) -> tuple[LocalInference, Problem, Broadcast]:
    inference = problems.build(part)
    of = problems.surveyed(inference, problems.separable(sharing="body"))
    return inference, of, problems.first_broadcast(inference, of)


def _fitted(inference: LocalInference, of: Problem, broadcast: Broadcast) -> Cohort:
    """Return the clients as they are after a round, ready to predict."""
    cohort = problems.cohort(of, inference)
    cohort = attrs.evolve(cohort, memory=inference.fit(of, broadcast, cohort).memory)
    return attrs.evolve(cohort, memory=inference.personalise(of, broadcast, cohort))


def _everything(inference: LocalInference, of: Problem, broadcast: Broadcast) -> dict[str, Any]:
    """Return what an inference gives in a round, by the name of the method."""
    cohort = problems.cohort(of, inference)
    result = inference.fit(of, broadcast, cohort)
    after = attrs.evolve(cohort, memory=result.memory)
    novel = inference.personalise(of, broadcast, attrs.evolve(cohort, novel=True))
    own = attrs.evolve(after, memory=inference.personalise(of, broadcast, after))
    with torch.no_grad():  # as the engine does
        draws = predicted(inference, of, broadcast, own)
    return {
        "survey": inference.survey(of, cohort),
        "initial_memory": inference.initial_memory(of),
        "fit": result,
        "personalise": own.memory,
        "personalise, of novel clients": novel,
        "predict": {"draws": draws},
    }


def _nll(inference: LocalInference, of: Problem, broadcast: Broadcast, cohort: Cohort) -> float:
    with torch.no_grad():
        found = inference.predict(of, broadcast, cohort, cohort.x)
    probability = found.mean.gather(-1, cohort.y[..., None]).clamp_min(1e-12)
    return float(-probability.log().mean())
