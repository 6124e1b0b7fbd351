"""The laws of fusion, as functions that raise `AssertionError` if a rule violates them.

Every law takes an aggregator and one case: posteriors ``[K, P]``, weights ``[K]`` (not all zero),
and their prior ``[P]``, whose variances are not below those of any client. `LAWS` lists which laws
an aggregator claims through its tags; `check_all` needs neither pytest nor hypothesis.

Tolerances. A fused number is a ratio of sums of up to K products, each rounded in the clients'
dtype, accumulated over K clients: the relative error `rounding` is a few units in the last place,
and K of them in the worst case. Means are sums of differences from the prior's mean, so their error
scales with the distance of the farthest client (and with the mean itself, which is rounded once at
the end). The variance of a mixture contains squared distances between clients, and their error. A
rule that subtracts K - 1 priors from K precisions, none below the prior's, retains at least a K-th
of their sum: its relative error is K times larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs
import torch

from bflcore.aggregation import Aggregator, State
from bflcore.posteriors import ExponentialFamily, Gaussian, Posterior
from bflcore.testing.aggregation_cases import Case, cases, with_mean
from bflcore.testing.aggregation_tolerances import (
    close,
    close_mean,
    gaussian,
    hold,
    reach,
    rounding,
    tiny,
    variances,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "LAWS",
    "Case",
    "Law",
    "cases",
    "check_all",
    "claimed",
    "close",
    "close_mean",
    "gaussian",
    "hold",
    "rounding",
    "tiny",
]


Check = Callable[[Aggregator, Case], None]


@attrs.frozen
class Law:
    """A law: its name, its check, and the tag by which rules claim it (empty: all rules)."""

    name: str
    check: Check
    tag: str = ""


def order_never_matters(rule: Aggregator, case: Case) -> None:
    """The result for reversed and rotated clients is the same (law 1)."""
    clients = len(case.weights)
    for order in ([*range(clients)][::-1], [*range(1, clients), 0]):
        close(rule, case, case.rows(order).fused_by(rule), case.fused_by(rule))


def grouping_never_matters(rule: Aggregator, case: Case) -> None:
    """A balanced tree, chains in both directions and streaming equal `fuse` (law 1)."""

    def tree(rows: list[int]) -> State:
        if len(rows) == 1:
            return _take_in(rule, case, rows)
        middle = (len(rows) + 1) // 2
        return rule.merge(tree(rows[:middle]), tree(rows[middle:]))

    clients = list(range(len(case.weights)))
    nobody = rule.start(case.prior)
    forwards, backwards, streamed = nobody, nobody, nobody
    for k in clients:
        forwards = rule.merge(forwards, _take_in(rule, case, [k]))
        backwards = rule.merge(_take_in(rule, case, [clients[-1 - k]]), backwards)
        streamed = rule.add(streamed, case.posteriors[[k]], case.weights[[k]])
    expected = case.fused_by(rule)
    for state in (tree(clients), forwards, backwards, streamed):
        close(rule, case, rule.finish(state), expected)


def states_are_plain_tensors(rule: Aggregator, case: Case) -> None:
    """A state whose tensors are copied and reordered is the same state."""
    first, *others = range(len(case.weights))
    here = _take_in(rule, case, [first])
    there = _take_in(rule, case, others) if others else rule.start(case.prior)
    sent = {name: there.tensors[name].clone() for name in sorted(there.tensors, reverse=True)}
    merged = rule.merge(here, there)
    received = rule.merge(here, State(case.prior, sent))
    for name, tensor in rule.finish(merged).pack().items():
        hold(rule.finish(received).pack()[name] == tensor, name, tensor)


def states_do_not_grow(rule: Aggregator, case: Case) -> None:
    """The state of twice as many clients has the same size, as streaming requires."""
    state = _take_in(rule, case, [*range(len(case.weights))])
    before = {name: tensor.shape for name, tensor in state.tensors.items()}
    twice = rule.add(state, case.posteriors, case.weights)
    after = {name: tensor.shape for name, tensor in twice.tensors.items()}
    if before != after:
        raise AssertionError(f"{rule.name}: the state grows from {before} to {after}")


def _take_in(rule: Aggregator, case: Case, rows: list[int]) -> State:
    chosen = case.rows(rows)
    return rule.add(rule.start(case.prior), chosen.posteriors, chosen.weights)


def one_client_is_returned(rule: Aggregator, case: Case) -> None:
    """``fuse([q]) == q`` (law 2)."""
    for k in {0, len(case.weights) - 1}:
        alone = Case(case.posteriors[[k]], case.weights.new_ones(1), case.prior)
        close(rule, alone, alone.fused_by(rule), case.posteriors[k])


def identical_clients_keep_their_mean(rule: Aggregator, case: Case) -> None:
    """Identical clients have the fused mean (law 3)."""
    same = _identical(case)
    fused, one = same.fused_by(rule), same.posteriors[0]
    close_mean(same, fused.mean, one.mean)


def identical_clients_keep_their_variance(rule: Aggregator, case: Case) -> None:
    """Averaging and pooling do not lower the variance of identical clients (law 3)."""
    same = _identical(case)
    close(rule, same, same.fused_by(rule), same.posteriors[0])


def identical_clients_of_equal_weight_divide_their_variance(rule: Aggregator, case: Case) -> None:
    """K identical clients with variance s have the fused variance s/K (law 3)."""
    same = _identical(case)
    same = Case(same.posteriors, torch.full_like(same.weights, 0.37), same.prior)
    one, clients = same.posteriors[0], len(same.weights)
    if isinstance(one, ExponentialFamily) and one.matrices:
        power = {name: clients * tensor for name, tensor in one.natural().items()}
        close(rule, same, same.fused_by(rule), one.with_natural(power))
        return
    expected = Gaussian(one.mean, gaussian(one).variance / clients)
    close(rule, same, same.fused_by(rule), expected)


def variance_is_at_most_the_average(rule: Aggregator, case: Case) -> None:
    """The fused variance never exceeds the clients' weighted mean (law 4)."""
    fused = case.fused_by(rule)
    if isinstance(fused, Gaussian):
        average = _average(case, gaussian(case.posteriors).variance.double(), rule)
        excess = fused.variance.double() - average * (1 + rounding(case))
        hold(excess <= tiny(case), "variance exceeds the weighted mean of variances", excess)


def variance_holds_that_of_the_means(rule: Aggregator, case: Case) -> None:
    """A mixture's variance is the mean variance plus the means' weighted variance (law 7)."""
    fused, clients = gaussian(case.fused_by(rule)), gaussian(case.posteriors)
    shift = clients.mean.double() - case.prior.mean.double()
    apart = shift - _average(case, shift, rule)
    expected = _average(case, clients.variance.double() + apart.square(), rule)
    close(rule, case, fused, Gaussian(fused.mean, expected.to(fused.mean.dtype)))


def evidence_adds_up(rule: Aggregator, case: Case) -> None:
    """The fused variance is at most the smallest of the clients' (law 4)."""
    fused, clients = variances(case.fused_by(rule)), variances(case.posteriors)
    excess = fused.double() - clients.double().amin(0) * (1 + rounding(case))
    hold(excess <= tiny(case), "variance exceeds that of the most certain client", excess)


def scale_of_weights_never_matters(rule: Aggregator, case: Case) -> None:
    """Only ratios of weights matter (law 5)."""
    for factor in (1e-9, 7.0, 1e6):
        scaled = Case(case.posteriors, case.weights * factor, case.prior)
        close(rule, case, scaled.fused_by(rule), case.fused_by(rule))


def zero_weight_is_absence(rule: Aggregator, case: Case) -> None:
    """A client of weight zero does not change the result (law 5)."""
    clients = len(case.weights)
    added = Case(
        type(case.posteriors).concatenate([case.posteriors, _elsewhere(case.posteriors[[0]])]),
        torch.cat([case.weights, case.weights.new_zeros(1)]),
        case.prior,
    )
    order = [clients, *range(clients)]
    close(rule, case, added.rows(order).fused_by(rule), case.fused_by(rule))


def weights_are_ignored(rule: Aggregator, case: Case) -> None:
    """Equal weights give the same result as the given ones."""
    equal = Case(case.posteriors, torch.ones_like(case.weights), case.prior)
    close(rule, case, case.fused_by(rule), equal.fused_by(rule))


def shift_is_carried_through(rule: Aggregator, case: Case) -> None:
    """Adding c to every mean adds c to the fused one and leaves the variance (law 6)."""
    shifted = case.map_means(lambda mean: mean + 2.0)
    fused = case.fused_by(rule)
    close(rule, shifted, shifted.fused_by(rule), with_mean(fused, lambda mean: mean + 2.0))


def scale_is_carried_through(rule: Aggregator, case: Case) -> None:
    """Scaling the parameter by a scales means by a and variances by a^2 (law 6)."""
    scaled = Case(_scaled(case.posteriors), case.weights, _scaled(case.prior))
    close(rule, scaled, scaled.fused_by(rule), _scaled(case.fused_by(rule)))


def prior_is_only_an_origin(rule: Aggregator, case: Case) -> None:
    """A rule that does not subtract the prior does not depend on it."""
    if "subtracts-prior" in rule.tags:
        return
    moved = Case(case.posteriors, case.weights, _elsewhere(case.prior))
    close(rule, moved, moved.fused_by(rule), case.fused_by(rule))


def unchanged_priors_come_back(rule: Aggregator, case: Case) -> None:
    """Any number of clients that return the prior leave it unchanged (law 9)."""
    rows = case.prior.map(lambda tensor: tensor.expand(len(case.weights), *tensor.shape))
    idle = Case(rows, case.weights, case.prior)
    close(rule, idle, idle.fused_by(rule), case.prior)


def changes_multiply(rule: Aggregator, case: Case) -> None:
    """Natural parameters are the prior's and every client's difference from it, with no floor.

    Also where a client is less certain than the prior, and the product less certain than either.
    """
    prior, q = case.prior, case.posteriors
    if not (isinstance(prior, ExponentialFamily) and isinstance(q, ExponentialFamily)):
        raise AssertionError(f"{prior.name} has no natural parameters")  # noqa: TRY004
    cases = [case]
    if isinstance(prior, Gaussian) and bool((prior.variance > 0).all()):
        wide = prior.map(lambda tensor: torch.stack([tensor, 8 * tensor, tensor]))
        cases.append(Case(wide, case.weights.new_ones(3), prior))
    for one in cases:
        fused, before = one.fused_by(rule), _natural(one.prior)
        changes = {n: (t - before[n]).sum(0) for n, t in _natural(one.posteriors).items()}
        due = {name: before[name] + change for name, change in changes.items()}
        if all(bool(tensor.isfinite().all()) for tensor in due.values()):  # no variance is 0
            expected = prior.with_natural(due)
            close(rule, one, fused, expected.map(lambda t: t.to(prior.mean.dtype)))


def _natural(posterior: Posterior) -> dict[str, Tensor]:
    assert isinstance(posterior, ExponentialFamily), "changes_multiply asks"  # noqa: S101
    return posterior.map(lambda t: t.double() if t.is_floating_point() else t).natural()


def results_are_valid_and_keep_their_dtype(rule: Aggregator, case: Case) -> None:
    """Results are finite, with variances >= 0, in dtype and shape of the prior (law 11)."""
    fused = case.fused_by(rule)
    if reason := fused.invalid():
        raise AssertionError(f"{rule.name}: {reason}")
    for name, wanted in case.prior.pack().items():
        found = fused.pack()[name]
        if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            raise AssertionError(
                f"{rule.name}: {name} is {found.dtype} {list(found.shape)}, not {wanted.dtype} "
                f"{list(wanted.shape)}"
            )


def certain_clients_decide(rule: Aggregator, case: Case) -> None:
    """Where some clients have variance 0, the fused mean is their weighted mean."""
    clients, fused = case.posteriors, case.fused_by(rule)
    variance = variances(fused)
    weights = case.weights if rule.weighs else torch.ones_like(case.weights)
    certain = ((variances(clients) == 0) & (weights > 0)[:, None]).double() * weights[:, None]
    known = certain.sum(0) > 0
    shift = clients.mean.double() - case.prior.mean.double()
    mean = (certain * shift).sum(0) / certain.sum(0) + case.prior.mean.double()
    close_mean(case, fused.mean, torch.where(known, mean, fused.mean.double()))
    hold((variance == 0) | ~known, "variance of a certain parameter", variance)


def influence_is_as_stated(rule: Aggregator, case: Case) -> None:
    """A client that moves its mean moves the fused one by at most `Aggregator.influence`."""
    stated, before = rule.influence(case.posteriors, case.weights, case.prior), case.fused_by(rule)
    if stated is None:
        return
    for k in {0, len(case.weights) - 1}:
        for far in (1.0, -30.0):
            moved = case.posteriors.pack()
            moved["mean"] = moved["mean"].clone()
            moved["mean"][k] += far
            after = Case(type(case.posteriors).unpack(moved), case.weights, case.prior)
            shift = (after.fused_by(rule).mean.double() - before.mean.double()).abs()
            bound = stated[k].double() * abs(far) * (1 + rounding(case))
            noise = 4 * len(case.weights) * rounding(case) * (reach(after) + reach(case))
            hold(shift <= bound + noise, "the mean moves further than `influence`", shift, bound)


def liars_do_not_decide(rule: Aggregator, case: Case) -> None:
    """However far as many clients lie as a rule withstands, the fused mean is `withstands` away."""
    clients = len(case.weights)
    for liars in range(1, clients):
        factor = rule.withstands(clients, liars)
        if factor == float("inf"):
            return
        for far, certain in ((1e5, 1e-6), (-1e5, 1e6)):
            lies = case.posteriors.pack()
            lies = {name: tensor.clone() for name, tensor in lies.items()}
            lies["mean"][:liars] += far
            if "variance" in lies:
                lies["variance"][:liars] *= certain
            lied = Case(type(case.posteriors).unpack(lies), case.weights, case.prior)
            fused, centre = lied.fused_by(rule).mean.double(), case.posteriors[-1]
            apart = _apart(case.posteriors[liars:], centre).amax(0)
            reached = (fused - centre.mean.double()).square().sum().sqrt()
            bound = factor * apart.square().sum().sqrt() * (1 + 1e-3)
            noise = 10 * clients * rounding(case) * reach(lied).square().sum().sqrt()
            hold(
                (reached <= bound + noise)[None], "liars move the mean", reached[None], bound[None]
            )


def _apart(posteriors: Posterior, centre: Posterior) -> Tensor:
    """Return how far apart means and standard deviations are ``[K, P]``."""
    square = (posteriors.mean.double() - centre.mean.double()).square()
    if isinstance(posteriors, Gaussian) and isinstance(centre, Gaussian):
        spread = posteriors.variance.double().sqrt() - centre.variance.double().sqrt()
        square = square + spread.square()
    return square.sqrt()


LAWS: tuple[Law, ...] = (
    Law("order never matters", order_never_matters),
    Law("grouping never matters", grouping_never_matters),
    Law("states are plain tensors", states_are_plain_tensors),
    Law("states do not grow", states_do_not_grow, "additive"),
    Law("one client is returned", one_client_is_returned),
    Law("shift is carried through", shift_is_carried_through),
    Law("scale is carried through", scale_is_carried_through),
    Law("the prior is only an origin", prior_is_only_an_origin),
    Law("results are valid", results_are_valid_and_keep_their_dtype),
    Law("identical clients keep their variance", identical_clients_keep_their_variance,
        "keeps-variance"),
    Law("identical clients divide their variance",
        identical_clients_of_equal_weight_divide_their_variance, "shrinks-variance"),
    Law("identical clients keep their mean", identical_clients_keep_their_mean, "pools"),
    Law("variance is at most the average", variance_is_at_most_the_average, "narrow"),
    Law("variance holds that of the means", variance_holds_that_of_the_means, "mixture"),
    Law("the scale of weights never matters", scale_of_weights_never_matters, "pools"),
    Law("a zero weight is absence", zero_weight_is_absence, "pools"),
    Law("weights are ignored by evidence", weights_are_ignored, "adds-evidence"),
    Law("weights are ignored by robust rules", weights_are_ignored, "robust"),
    Law("evidence adds up", evidence_adds_up, "adds-evidence"),
    Law("unchanged priors come back", unchanged_priors_come_back, "subtracts-prior"),
    Law("certain clients decide", certain_clients_decide, "adds-precision"),
    Law("influence is as stated", influence_is_as_stated),
    Law("liars do not decide", liars_do_not_decide, "robust"),
    Law("changes multiply", changes_multiply, "multiplies-changes"),
)  # fmt: skip


def claimed(rule: Aggregator) -> Iterator[Law]:
    """Yield the laws that an aggregator claims."""
    yield from (law for law in LAWS if not law.tag or law.tag in rule.tags)


def check_all(rule: Aggregator) -> None:
    """Check every law that `rule` claims on fixed cases of every family it fuses."""
    for case in cases(rule.families):
        for law in claimed(rule):
            law.check(rule, case)


def _elsewhere(posterior: Posterior) -> Posterior:
    """Change every field that describes the parameters."""
    return posterior.unpack(
        {
            name: tensor if name in posterior.structure else tensor.abs() * 3 + 1
            for name, tensor in posterior.pack().items()
        }
    )


def _scaled(posterior: Posterior, by: float = 3.0) -> Posterior:
    fields = posterior.pack()
    factors = {"mean": -by, "variance": by * by}
    return type(posterior).unpack({name: fields[name] * factors.get(name, 1.0) for name in fields})


def _identical(case: Case) -> Case:
    rows = [0] * len(case.weights)
    return Case(case.posteriors[rows], case.weights, case.prior)


def _average(case: Case, values: Tensor, rule: Aggregator) -> Tensor:
    """Return the mean over clients ``[P]``, with the weights that `rule` uses."""
    weights = case.weights if rule.weighs else torch.ones_like(case.weights)
    share = weights.double() / weights.double().sum()
    return (share[:, None] * values).sum(0)
