"""Fusion rules, weightings and Monte-Carlo dropout: Fischer et al. 2024; order statistics.

q_k = N(mu_k, s_k) for every parameter, weights w_k; the formulas are for weights that sum to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, cast

from bfl_aggregators.dropout import MCDropout
from bflcore import (
    AdditiveAggregator,
    Aggregator,
    LocalInference,
    Method,
    Statistics,
    Weighting,
    component,
    hookimpl,
    option,
)
from bflcore.aggregation import (
    CoordinatewiseAggregator,
    block_by_block,
    check_posteriors,
    weighted_sum,
)

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore import Broadcast, Gaussian, Posterior

PAPER = "Fischer, Orescanin, Loomis & McClure 2024"


@component
class WeightedSum(CoordinatewiseAggregator):
    """Fuse as the weighted sum of independent random variables.

    mean = sum w mu, variance = sum w^2 s.
    """

    name = "weighted-sum"
    aliases = ("ws",)
    reference = f"{PAPER} (WS)"
    families = ("gaussian",)
    tags = frozenset({"pools", "additive", "shrinks-variance", "narrow"})

    def sums(self, weights: Tensor, *fields: Tensor) -> Statistics:
        """Sum w, w d and w^2 s."""
        shift, variance = fields
        return {
            "weight": weights.sum(),
            "mean": weighted_sum(weights, shift),
            "variance": weighted_sum(weights.square(), variance),
        }

    def fused(self, total: Statistics, prior: Posterior) -> Posterior:
        """Divide by the sum of weights and by its square."""
        from bfl_aggregators import rules

        return rules.normalise(total, prior, power=2)


@component
class LinearPool(CoordinatewiseAggregator):
    """Fuse as the mixture of the clients' posteriors, matched in its moments.

    mean = sum w mu, variance = sum w s + sum w (mu_k - mean)^2.
    """

    name = "linear-pool"
    aliases = ("lp",)
    reference = f"{PAPER} (LP); Koliander et al. 2022"
    families = ("gaussian",)
    tags = frozenset({"pools", "additive", "keeps-variance", "mixture"})

    def sums(self, weights: Tensor, *fields: Tensor) -> Statistics:
        """Sum w, w d, and w (s + (d - centre)^2)."""
        from bfl_aggregators import rules

        return rules.linear_pool_sums(weights, *fields)

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        """Add, with what the distance between the parts' centres contributes."""
        from bfl_aggregators import rules

        return rules.merge_linear_pools(left, right)

    def fused(self, total: Statistics, prior: Posterior) -> Posterior:
        """Divide by the sum of weights."""
        from bfl_aggregators import rules

        return rules.normalise(total, prior, power=1)


@component
class NaturalAggregator(CoordinatewiseAggregator):
    """Base of rules that add precisions; where a client is certain, the certain ones decide."""

    families = ("gaussian",)

    cancels: ClassVar[bool] = False  # precisions are subtracted later: keep float64's digits

    def sums(self, weights: Tensor, *fields: Tensor) -> Statistics:
        """Sum w, w/s and w d/s."""
        from bfl_aggregators import rules

        counted = weights if self.weighs else weights.new_ones(len(weights))
        shift, variance = fields
        sums = rules.natural_sums(counted, shift, variance, exact=self.cancels)
        return {"weight": counted.sum(), **sums}


@component
class LogLinearPool(NaturalAggregator):
    """Fuse as the weighted geometric mean of the densities.

    precision = sum w/s, mean = sum(w mu/s) / precision.
    """

    name = "log-linear-pool"
    aliases = ("llp",)
    reference = f"{PAPER} (LLP); Koliander et al. 2022"
    tags = frozenset({"pools", "additive", "keeps-variance", "narrow", "adds-precision"})

    def fused(self, total: Statistics, prior: Posterior) -> Posterior:
        """Divide natural parameters by the sum of weights."""
        from bfl_aggregators import rules

        return rules.from_natural(total, prior, total["weight"])


@component
class Conflation(NaturalAggregator):
    """Fuse as the product of the densities: independent measurements of one thing.

    precision = sum 1/s, mean = sum(mu/s) / precision. Weights are ignored.
    """

    name = "conflation"
    reference = f"{PAPER}; Hill & Miller 2011"
    tags = frozenset({"adds-evidence", "additive", "shrinks-variance", "narrow", "adds-precision"})

    def fused(self, total: Statistics, prior: Posterior) -> Posterior:
        """Turn natural parameters into moments."""
        from bfl_aggregators import rules

        return rules.from_natural(total, prior, total["weight"].new_ones(()))


@component
class WeightedConflation(NaturalAggregator):
    """Fuse as the product of the densities, each to the power w over the largest w.

    precision = sum(w/s) / max w, mean = sum(w mu/s) / sum(w/s).
    """

    name = "weighted-conflation"
    aliases = ("wc",)
    reference = f"{PAPER} (WC); Hill & Miller 2011"
    tags = frozenset({"pools", "additive", "shrinks-variance", "narrow", "adds-precision"})

    def sums(self, weights: Tensor, *fields: Tensor) -> Statistics:
        """Add the largest weight to the sums."""
        return {"heaviest": weights.max(), **super().sums(weights, *fields)}

    def merge(self, left: Statistics, right: Statistics) -> Statistics:
        """Add sums; of two largest weights keep the larger."""
        heaviest = left["heaviest"].maximum(right["heaviest"])
        added = super().merge(left, right)
        return {**added, "heaviest": heaviest}

    def fused(self, total: Statistics, prior: Posterior) -> Posterior:
        """Divide precisions by the largest weight."""
        from bfl_aggregators import rules

        return rules.from_natural(total, prior, total["heaviest"])


@component
class WeightConsolidation(NaturalAggregator):
    """Multiply the densities and divide by all but one of the priors they share.

    precision = sum 1/s - (K - 1)/s_0, mean = (sum mu/s - (K - 1) mu_0/s_0) / precision: exact Bayes
    for conjugate models. Weights are ignored. Coordinates whose precision does not exceed the
    floor get the prior's variance and the clients' precision-weighted mean, and are counted.
    """

    name = "weight-consolidation"
    aliases = ("dwc",)
    reference = f"{PAPER} (DWC); McClure et al. 2018"
    tags = frozenset({"adds-evidence", "additive", "subtracts-prior", "adds-precision"})
    cancels = True

    floor: float = option(
        0.0,
        "fraction of the prior's precision that a fused one must exceed; 1: data never takes "
        "certainty away, as in exact Bayes",
        at_least=0,
        at_most=1,
    )

    def fused(self, total: Statistics, prior: Posterior) -> Posterior:
        """Take the surplus priors out."""
        from bfl_aggregators import rules

        return rules.consolidate(total, cast("Gaussian", prior), self.floor)

    def report(self, total: Statistics, prior: Posterior) -> dict[str, float]:
        """Return how many coordinates were floored."""
        from bfl_aggregators import rules

        low = (
            rules.consolidated_precision(sums, cast("Gaussian", origin), self.floor)[1].sum()
            for _, sums, origin in block_by_block(total, prior)
        )
        return {"floored": float(sum(low))}


@component
class Median(Aggregator):
    """Take the median over clients, coordinate by coordinate.

    Medians of means and of variances: where a typical client stands and how sure it is; that the
    clients disagree does not widen the result. Weights are ignored, since a client could claim any
    number of samples. Of an even number of clients, the mean of the middle two.
    """

    name = "median"
    reference = "Yin et al. 2018, Algorithm 1, option I"
    families = ("point", "gaussian")
    tags = frozenset({"robust", "keeps-variance"})

    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Cut all but the middle one or two."""
        from bfl_aggregators import robust

        clients = len(posteriors.mean)
        self.check(posteriors, weights, prior)
        check_posteriors(posteriors)
        return robust.trimmed_mean(posteriors, (clients - 1) // 2)


@component
class TrimmedMean(Aggregator):
    """Average over clients without the extremes, coordinate by coordinate.

    Of K clients the ``floor(fraction * K)`` smallest and as many of the largest values are left
    out, of means and of variances separately. Weights are ignored, as by `median`.
    """

    name = "trimmed-mean"
    reference = "Yin et al. 2018, Algorithm 1, option II"
    families = ("point", "gaussian")
    tags = frozenset({"robust", "keeps-variance"})

    fraction: float = option(0.1, "share of clients cut at either end", at_least=0, below=0.5)

    def fuse(self, posteriors: Posterior, weights: Tensor, prior: Posterior) -> Posterior:
        """Cut both ends."""
        from bfl_aggregators import robust

        clients = len(posteriors.mean)
        self.check(posteriors, weights, prior)
        check_posteriors(posteriors)
        # 0.29 * 100 is 28.999... in binary; nobody means 28.
        return robust.trimmed_mean(posteriors, int(self.fraction * clients + 1e-9))


@component
class MaxDiscrepancy(Weighting):
    """Weigh each client by the inverse of its divergence from the others.

    gamma_k = 1 / d_k, where d_k is the sum (or maximum) over j of KL(q_k || q_j), or of
    KL(q_j || q_k). Identical clients weigh the same. Takes K^2 P steps.
    """

    name = "max-discrepancy"
    reference = f"{PAPER}, which leaves sum or max and the direction open"
    families = ("gaussian",)
    local = False

    direction: str = option(
        "to-others",
        "KL(q_k || q_j) or KL(q_j || q_k)",
        choices=("to-others", "from-others"),
    )
    over: str = option("sum", "how divergences from the others combine", choices=("sum", "max"))

    def weigh(self, posteriors: Posterior, examples: Tensor, broadcast: Broadcast) -> Tensor:
        """Return 1 / d_k."""
        from bfl_aggregators import weightings

        gaussians = cast("Gaussian", posteriors)
        return weightings.max_discrepancy_weights(gaussians, self.direction, self.over)


@component
class Distance(Weighting):
    """Weigh each client by the inverse of its divergence from the last global posterior.

    gamma_k = 1 / KL(q_k || q), where q is what the round started from.
    """

    name = "distance"
    reference = PAPER
    families = ("gaussian",)

    def weigh(self, posteriors: Posterior, examples: Tensor, broadcast: Broadcast) -> Tensor:
        """Return 1 / KL."""
        from bfl_aggregators import weightings

        return weightings.distance_weights(cast("Gaussian", posteriors), broadcast)


class MCDropoutMethod(Method):
    """Train one shared network with dropout by federated averaging; predict by its masks."""

    name = "mc-dropout"
    reference = PAPER
    inference = "mc-dropout"


RULES: tuple[type[AdditiveAggregator], ...] = (
    WeightedSum,
    LinearPool,
    LogLinearPool,
    Conflation,
    WeightedConflation,
    WeightConsolidation,
)


@hookimpl
def bfl_aggregators() -> Iterator[type[Aggregator]]:
    """Yield the additive rules and the robust ones."""
    yield from RULES
    yield from (Median, TrimmedMean)


@hookimpl
def bfl_weightings() -> Iterator[type[Weighting]]:
    """Yield the weightings by divergence."""
    yield from (MaxDiscrepancy, Distance)


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield Monte-Carlo dropout."""
    yield MCDropout


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield the method of the same name."""
    yield MCDropoutMethod
