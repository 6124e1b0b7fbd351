"""Weightings by the KL divergence between posteriors, in nats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bfl_aggregators.pools import PAPER
from bflcore import Broadcast, Gaussian, Posterior, Weighting, component, option
from bflcore.aggregation import COORDINATES, slices
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = ["Distance", "MaxDiscrepancy"]

# Bounds on divergences in nats, so that weights are positive and finite, and equal if all
# divergences are zero (identical posteriors) or infinite (variance 0 at one client only).
NEAREST, FARTHEST = 1e-12, 1e100


def _cap() -> float:
    """Declare the option that keeps one client from deciding alone."""
    return option(
        4.0,
        "largest weight, as a multiple of the median over clients (0 = no limit)",
        at_least=0,
    )


@component
class MaxDiscrepancy(Weighting):
    """Weigh each client by the inverse of its divergence from the others.

    gamma_k = 1 / d_k, where d_k is the sum (or maximum) over j of KL(q_k || q_j), or of
    KL(q_j || q_k). Identical clients have the same weight. The cost is of order K^2 P.
    """

    name = "max-discrepancy"
    reference = f"{PAPER}, which leaves sum or max and the direction open"
    families = ("gaussian",)
    local = False

    direction: str = option(
        "to-others",
        "direction of the divergence: KL(q_k || q_j) or KL(q_j || q_k)",
        choices=("to-others", "from-others"),
    )
    over: str = option(
        "sum", "combination of the divergences from the other clients", choices=("sum", "max")
    )
    cap: float = _cap()

    def weigh(self, posteriors: Posterior, examples: Tensor, broadcast: Broadcast) -> Tensor:
        """Return 1 / d_k ``[K]``, from KL(q_k || q_j) ``[K, K]`` in row k and column j."""
        clients, parameters = posteriors.mean.shape
        apart = posteriors.mean.new_zeros(clients, clients, dtype=torch.float64)
        for chunk in slices(parameters, COORDINATES):
            everybody = _select(posteriors, chunk)
            for k in range(clients):
                apart[k] += everybody[k].kl(everybody)
        if self.direction == "from-others":
            apart = apart.T
        return _invert(apart.sum(1) if self.over == "sum" else apart.amax(1), self.cap)


@component
class Distance(Weighting):
    """Weigh each client by the inverse of its divergence from the last global posterior.

    gamma_k = 1 / KL(q_k || q), where q is the start of the round. Without the `cap`, a client that
    returns the start unchanged would have all the weight.
    """

    name = "distance"
    reference = PAPER
    families = ("gaussian",)
    local = False

    cap: float = _cap()

    def weigh(self, posteriors: Posterior, examples: Tensor, broadcast: Broadcast) -> Tensor:
        """Return 1 / KL ``[K]``."""
        clients, parameters = posteriors.mean.shape
        apart = posteriors.mean.new_zeros(clients, dtype=torch.float64)
        for chunk in slices(parameters, COORDINATES):
            apart += _select(posteriors, chunk).kl(_select(broadcast.start, chunk))
        return _invert(apart, self.cap)


def _select(posterior: Posterior, chunk: slice) -> Gaussian:
    """Return the posterior over a slice of the parameters, in float64."""
    assert isinstance(posterior, Gaussian), "the registry admits no other family"  # noqa: S101
    return posterior.map(lambda tensor: tensor[..., chunk].double())


def _invert(divergence: Tensor, cap: float) -> Tensor:
    weights = divergence.clamp(NEAREST, FARTHEST).reciprocal()
    return weights.clamp_max(cap * weights.median()) if cap else weights
