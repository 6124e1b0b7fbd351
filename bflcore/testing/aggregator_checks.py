"""Checks of aggregators: inputs stay unchanged, and all laws claimed by tags hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bflcore.aggregation import Aggregator
from bflcore.posteriors import ExponentialFamily, Posterior
from bflcore.testing import problems
from bflcore.testing.aggregation_laws import Case, Law, cases, claimed
from bflcore.testing.surroundings import undisturbed

__all__ = ["checks_of"]

Part = type[Aggregator]


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:
    """Yield the checks of an aggregator, one per law."""
    yield from (inputs_stay_untouched, leaves_the_process_as_it_was, results_are_new_tensors)
    yield from (weights_that_make_no_sense_are_refused, ignored_weights_are_declared)
    yield tags_are_declared
    if part.closed_form is not Aggregator.closed_form:
        yield fuse_is_its_closed_form
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


def leaves_the_process_as_it_was(part: Part) -> None:
    """Fusing prints nothing, and changes no global generator or setting of torch."""
    case = next(case for case in _cases(part) if len(case.weights) > 1)
    with undisturbed("fusing"):
        case.fused_by(part())
        streamed(part(), case)


def results_are_new_tensors(part: Part) -> None:
    """The fused posterior shares no memory with what was fused, and does not require grad."""
    for case in _cases(part):
        given = {
            storage(t)
            for one in (case.posteriors, case.prior)
            for name, t in one.pack().items()
            if name not in case.prior.structure
        }
        for name, tensor in case.fused_by(part()).pack().items():
            if name not in case.prior.structure and storage(tensor) in given:
                raise AssertionError(
                    f"the fused {name} of {len(case.weights)} clients is a view of an input, which "
                    "a later change would reach; return a copy (.clone())"
                )
            if tensor.requires_grad:
                raise AssertionError(f"the fused {name} requires grad; return {name}.detach()")


def ignored_weights_are_declared(part: Part) -> None:
    """A rule declares, with a reason, whether it ignores weights, and does what it declares."""
    if part.weighs == bool(part.ignores_weights_because):
        raise AssertionError(
            f"weighs is {part.weighs} and ignores_weights_because is "
            f"{part.ignores_weights_because!r}; give a reason if and only if weighs is False"
        )
    if part.weighs and part.tags & {"adds-evidence", "robust"}:
        raise AssertionError(
            f"weighs is True, but tags are {sorted(part.tags)}; adds-evidence and robust "
            "claim that weights are ignored"
        )
    matters = any(
        problems.difference(_reweighed(case).fused_by(part()), case.fused_by(part()), 1e-4)
        for case in _cases(part)
        if len(case.weights) > 1
    )
    if matters != part.weighs:
        raise AssertionError(
            f"weighs is {part.weighs}, but other weights give "
            f"{'another' if matters else 'the same'} result; declare weighs = {matters}"
        )


def tags_are_declared(part: Part) -> None:
    """`tags` is written in the class, even where it is empty: it decides which laws are checked."""
    if not any("tags" in vars(base) for base in part.__mro__[: part.__mro__.index(Aggregator)]):
        raise AssertionError(
            "tags are not declared, so these laws are not checked: "
            f"{'; '.join(f'{tag} ({promise})' for tag, promise in part.known_tags.items())}; write "
            "tags = frozenset({...}) with those that hold, or tags = frozenset()"
        )


def fuse_is_its_closed_form(part: Part) -> None:
    """`fuse` gives what `closed_form` states, on random posteriors of positive variance."""
    for case in _cases(part):
        variance = case.posteriors.pack().get("variance")
        if variance is not None and not bool((variance > 0).all()):
            continue
        # In float64: the formula of a paper may be less careful than `fuse` about rounding.
        exact = Case(_double(case.posteriors), case.weights.double(), _double(case.prior))
        stated = part().closed_form(exact.posteriors, exact.weights, exact.prior)
        if stated is None:
            raise AssertionError("closed_form returns None; return what fuse must return")
        found = exact.fused_by(part())
        problems.assert_same(found, stated, "fuse, compared with closed_form", 1e-6)


def streamed(rule: Aggregator, case: Case) -> Posterior:
    """Fuse ``[P]`` client by client, as the round loop does."""
    state = rule.start(case.prior)
    for k in range(len(case.weights)):
        state = rule.add(state, case.posteriors[[k]], case.weights[[k]])
    return rule.finish(rule.merge(rule.start(case.prior), state))


def storage(tensor: Tensor) -> int:
    """Return where in memory a tensor's ``[...]`` numbers are kept."""
    return tensor.untyped_storage().data_ptr()


def _reweighed(case: Case) -> Case:
    return Case(case.posteriors, case.weights.flip(0) + 1.0, case.prior)


def _double(posterior: Posterior) -> Posterior:
    return posterior.map(lambda t: t.double() if t.is_floating_point() else t)


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
            prior = family.arbitrary(layout, 1, noise)[0]
            yield Case(_more_certain(posteriors, prior), weights, prior)


def _more_certain(posteriors: Posterior, prior: Posterior) -> Posterior:
    """Return the posteriors ``[K, P]``, times the prior where a family's densities multiply.

    Rules that subtract the prior need clients that know at least what it says.
    """
    if not (isinstance(posteriors, ExponentialFamily) and isinstance(prior, ExponentialFamily)):
        return posteriors
    before = prior.natural()
    return posteriors.with_natural({n: t + before[n] for n, t in posteriors.natural().items()})
