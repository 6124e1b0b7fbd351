"""Duals: what each client adds to its objective so that all clients come to agree.

A dual has the natural parameters of a Gaussian factor, V_k (precision) and v_k (shift). Where all
clients agree, it is the client's own factor of the posterior, its site.

The server keeps the sum of all duals, which clients change by what they send: it is right whoever
takes part in a round, and a client whose result is refused keeps the dual that is in the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from bflcore import Broadcast, Gaussian, HyperUpdate, Point, component, option
from bflcore.aggregation import add_sums
from bflcore.inference.sites import exact_natural
from bflcore.lazy import lazy
from bflcore.messages import within

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import LocalResult, Posterior, Statistics
else:
    torch = lazy("torch")

__all__ = ["DUAL", "STEPS", "DualUpdate"]

DUAL = "dual."  # of statistics: the change of a client's dual; of the server's state: their sum
STEPS = "steps"  # the statistic: the client's rho, whose sum over the clients is K rho


@component
class DualUpdate(HyperUpdate):
    """Average the clients' natural parameters with those that prior and duals give.

    eta = (1 - a) mean_k eta_k + a (eta_0 + sum_k dual_k), over the clients of the round and the
    duals of all clients. Where the clients agree, eta = eta_0 + sum_k dual_k.
    """

    name = "dual-update"
    reference = "Möllenhoff et al. 2026 (Bayesian ADMM), server step; Swaroop et al. 2025 (FedLap)"
    families = ("point", "gaussian")

    server_step: float | None = option(
        None, "weight of prior and duals (a; none: 1/(1 + K rho), 1: FedLap)", above=0, at_most=1
    )
    floor: float = option(
        1e-3, "smallest precision, as a fraction of the mean of the clients'", above=0, at_most=1
    )

    def summarise(self, result: LocalResult, weights: Tensor, broadcast: Broadcast) -> Statistics:
        """Sum the changes of the duals ``[P]``, and the clients' rho."""
        return {
            name: tensor.double().sum(0)
            for name, tensor in result.statistics.items()
            if name.startswith(DUAL) or name == STEPS
        }

    def update(self, broadcast: Broadcast, fused: Posterior, total: Statistics) -> Broadcast:
        """Take the server's step; its result is the next start and prior."""
        duals = add_sums(within(broadcast.hyper, DUAL), within(total, DUAL))
        if not duals:
            return attrs.evolve(broadcast, round=broadcast.round + 1, start=fused, prior=fused)
        share = self.server_step or 1 / (1 + float(total[STEPS]))
        following = self._step(broadcast.first_prior or broadcast.prior, fused, duals, share)
        state = {**broadcast.hyper, **{DUAL + name: tensor for name, tensor in duals.items()}}
        return Broadcast(broadcast.round + 1, following, following, state)

    def _step(
        self, first: Posterior, fused: Posterior, duals: dict[str, Tensor], share: float
    ) -> Posterior:
        if isinstance(fused, Point):
            mean = (1 - share) * fused.mean.double() + share * duals["shift"]
            return Point(mean.to(fused.mean.dtype))
        before, average = exact_natural(first), exact_natural(fused)
        natural = {
            name: (1 - share) * mean + share * (before[name] + duals[name])
            for name, mean in average.items()
        }
        # Duals of noisy Hessians may outweigh the prior: such a parameter keeps the clients' mean.
        low = natural["precision"] < self.floor * average["precision"]
        natural = {
            name: torch.where(low, self.floor * average[name], t) for name, t in natural.items()
        }
        return Gaussian.from_natural(natural).map(lambda t: t.to(fused.mean.dtype))
