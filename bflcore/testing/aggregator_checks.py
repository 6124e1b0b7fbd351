"""Checks of aggregators: inputs stay unchanged, and all laws claimed by tags hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bflcore.aggregation import Aggregator
from bflcore.testing import problems
from bflcore.testing.aggregation_laws import Case, Law, cases, claimed

__all__ = ["checks_of"]

Part = type[Aggregator]


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:
    """Yield the checks of an aggregator, one per law."""
    yield inputs_stay_untouched
    yield from (weights_that_make_no_sense_are_refused, ignored_weights_are_declared)
    for law in claimed(part()):
        yield _check_of(law)


def inputs_stay_untouched(part: Part) -> None:
    """Fusing leaves posteriors, weights and prior as they were."""
    for case in _cases(part):
        before = problems.copies(case)
        case.fused_by(part())
        problems.assert_same(case, before[0], "an input was changed in place", 0.0)


def weights_that_make_no_sense_are_refused(part: Part) -> None:
    """Negative weights, weights that are all zero, and too few of them raise `OptionError`."""
    from bflcore.errors import OptionError

    case = next(case for case in _cases(part) if len(case.weights) > 1)
    for what, weights in (
        ("a negative weight", case.weights - 2 * case.weights.max()),
        ("weights that are all zero", case.weights * 0),
        ("a weight that is not finite", case.weights * float("nan")),
        ("too few weights", case.weights[1:]),
    ):
        try:
            Case(case.posteriors, weights, case.prior).fused_by(part())
        except OptionError:
            continue
        raise AssertionError(
            f"{what} is not refused; begin with self.check(posteriors, weights, prior)"
        )


def ignored_weights_are_declared(part: Part) -> None:
    """A rule that ignores weights declares it and gives a reason."""
    if part.weighs == bool(part.ignores_weights_because):
        raise AssertionError(
            f"weighs is {part.weighs} and ignores_weights_because is "
            f"{part.ignores_weights_because!r}; give a reason if and only if weighs is False"
        )
    if part.weighs == bool(part.tags & {"adds-evidence", "robust"}):
        raise AssertionError(
            f"weighs is {part.weighs}, but tags are {sorted(part.tags)}; adds-evidence and robust "
            "claim that weights are ignored"
        )


def _check_of(law: Law) -> Callable[[Part], None]:
    def check(part: Part) -> None:
        for case in _cases(part):
            law.check(part(), case)

    check.__name__ = law.name.replace(" ", "_")
    return check


def _cases(part: Part) -> Iterator[Case]:
    """Yield the cases of the laws for points and Gaussians, and a few for other families."""
    layout = problems.separable().layout
    for family in problems.families(part):
        if family.name in {"point", "gaussian"}:
            yield from cases((family.name,))
            continue
        for seed, clients in enumerate((1, 2, 7)):
            noise = problems.generator(seed)
            posteriors = family.arbitrary(layout, clients, noise)
            weights = torch.rand(clients, generator=noise, dtype=torch.float64) + 0.1
            yield Case(posteriors, weights, family.arbitrary(layout, 1, noise)[0])
