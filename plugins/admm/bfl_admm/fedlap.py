"""FedLap (Swaroop et al. 2025): the duals of Gaussians with one fixed precision, which is ADMM.

With delta the precision of the prior N(0, 1/delta) and of every posterior, client k finds

    w_k = argmin N_k loss(w) + delta v_k' w + delta/2 ||w - w_server||^2,
    v_k <- v_k + rho (w_k - w_server),

and the server takes w = (1 - a) mean_k w_k + a sum_k v_k, in FedLap with a = 1. Where the clients
agree, w is the MAP estimate of the pooled data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from bfl_admm.bayes import check_update
from bfl_admm.duals import DUAL, STEPS
from bflcore import Point, PointInference, component, option
from bflcore.inference.memory import join_personal
from bflcore.inference.point import fit_points
from bflcore.inference.sites import SiteMemory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from bflcore import Broadcast, Cohort, Component, LocalResult, Problem
    from bflcore.inference.gradient import Batch
    from bflcore.inference.point import LossAndGradient

__all__ = ["FedLapInference"]


@component
class FedLapInference(PointInference):
    """Find a point estimate against the server's and the client's own dual.

    Use with ``--hyper dual-update``. Personal parameters have the prior N(0, 1/delta), and no dual.
    """

    name = "fedlap"
    reference = "Swaroop et al. 2025 (FedLap), Algorithm 1"
    hides = ("anchor", "anchor_to", "weight_decay")

    delta: float = option(1.0, "precision of the prior and of all posteriors", above=0)
    rho: float = option(0.1, "step of the duals", above=0)

    def check_parts(self, parts: Mapping[str, Component]) -> None:
        """Raise `IncompatibleError` for an update that does not know of duals."""
        check_update(self.name, parts)

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of a client whose dual is zero."""
        shared, personal = self.initial(problem).split(problem.layout)
        return SiteMemory(personal=personal, site={"shift": 0 * shared.mean.double()}).pack()

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train every client from the server's network, and change its dual."""
        dual = SiteMemory.unpack(cohort.memory, Point).site["shift"]
        start = join_personal(problem, broadcast.start, cohort).mean
        layout, personal = (
            problem.layout,
            start.new_zeros(len(start), problem.layout.personal_total),
        )
        pull = layout.join(dual.to(start.dtype), personal)
        centre = layout.join(layout.split(start)[0], personal)
        weight = self.delta / start.new_tensor(cohort.sizes).clamp_min(1)[:, None]

        def with_dual(
            loss_and_gradient: LossAndGradient, w: Tensor, batch: Batch
        ) -> tuple[Tensor, Tensor]:
            loss, gradient = loss_and_gradient(w, batch)
            k = len(w)
            return loss, gradient + weight[:k] * (w - centre[:k] + pull[:k])

        result = fit_points(self, problem, broadcast, cohort, transform=with_dual)
        change = self.rho * (result.posterior.mean.double() - broadcast.start.mean.double())
        kept = SiteMemory(
            personal=SiteMemory.unpack(result.memory, Point).personal, site={"shift": dual + change}
        )
        statistics = {f"{DUAL}shift": change, STEPS: start.new_full((len(start),), self.rho)}
        return attrs.evolve(result, statistics=statistics, memory={**result.memory, **kept.pack()})
