"""Bayesian ADMM (Möllenhoff et al. 2026): Gaussians whose duals have a precision, too.

Client k fits, starting from the server's q,

    q_k = argmin E_q'[-log p(D_k | w)] + E_q'[log t_k(w)] + rho KL(q' || q)

with the factor t_k of its dual (V_k, v_k), which the framework's other inferences would call its
site, and then changes the dual by rho times the difference of natural parameters:

    V_k <- V_k + rho (S_k - S),    v_k <- v_k + rho (S_k m_k - S m)

The objective is that of a likelihood to the power 1/rho with the prior q t_k^(-1/rho); that product
need not be a density, and IVON does not ask for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from bfl_admm.duals import DUAL, STEPS
from bfl_ivon.ivon import NewtonInference, train
from bflcore import Gaussian, IncompatibleError, component, option
from bflcore.inference.gradient import mean_loss, steps
from bflcore.inference.memory import join_personal, local_result
from bflcore.inference.sites import SiteMemory, exact_natural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from bflcore import Broadcast, Cohort, Component, LocalResult, Problem

__all__ = ["BayesianADMM", "check_update"]


@component
class BayesianADMM(NewtonInference):
    """Fit a mean-field Gaussian by IVON against the server's and the client's own dual.

    Use with ``--hyper dual-update``. Personal parameters have the first prior, and no dual.
    """

    name = "bayes-admm"
    reference = "Möllenhoff et al. 2026 (Bayesian ADMM), IVON-ADMM; Swaroop et al. 2025"
    hides = ("optimiser", "estimator", "personal_prior")

    rho: float = option(1.0, "weight of the divergence from the server's posterior", above=0)
    dual_damping: float = option(1.0, "share of a dual's change that is made", above=0, at_most=1)

    def check_parts(self, parts: Mapping[str, Component]) -> None:
        """Raise `IncompatibleError` for an update that does not know of duals."""
        check_update(self.name, parts)

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of a client whose dual is zero."""
        return SiteMemory.empty(*self.initial(problem).split(problem.layout)).pack()

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Fit every client's Gaussian, send it with the change of the dual, and keep the dual."""
        server = exact_natural(broadcast.start)
        dual = SiteMemory.unpack(cohort.memory, Gaussian).site
        start = join_personal(problem, broadcast.start, cohort)
        assert isinstance(start, Gaussian), "the registry admits no other family"  # noqa: S101
        fitted, loss = train(
            self,
            problem,
            cohort,
            start,
            self._prior(problem, start, server, dual),
            [size / (self.kl_weight * self.rho) for size in cohort.sizes],
        )
        result = local_result(problem, cohort, fitted, mean_loss(loss, steps(self, cohort)))
        sent = exact_natural(result.posterior)
        rate = self.rho * self.dual_damping
        seen = loss.new_tensor(cohort.sizes)[:, None] > 0
        change = {name: rate * (t - server[name]) * seen for name, t in sent.items()}
        kept = SiteMemory(
            personal=fitted.split(problem.layout)[1],
            site={name: tensor + change[name] for name, tensor in dual.items()},
        )
        statistics = {DUAL + name: tensor for name, tensor in change.items()}
        statistics[STEPS] = loss.new_full((len(loss),), self.rho)
        return attrs.evolve(result, statistics=statistics, memory={**result.memory, **kept.pack()})

    def _prior(
        self,
        problem: Problem,
        start: Gaussian,
        server: Mapping[str, Tensor],
        dual: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Return the natural parameters ``[K, P]`` of q t_k^(-1/rho), in the dtype of `start`."""
        first = self.prior(problem).split(problem.layout)[1].natural()
        joined = {}
        for name, tensor in dual.items():
            shared = (server[name] - tensor / self.rho).to(start.mean.dtype)
            # A likelihood to the power 1/rho needs the personal prior to the same power.
            personal = (first[name] / self.rho).expand(len(shared), -1)
            joined[name] = problem.layout.join(shared, personal)
        return joined


def check_update(inference: str, parts: Mapping[str, Component]) -> None:
    """Raise `IncompatibleError` unless the prior update is `dual-update`."""
    if (hyper := parts["hyper"]).name != "dual-update":
        raise IncompatibleError(
            f"--inference {inference} does not work with --hyper {hyper.name}, which does not add "
            "up the clients' duals; choose --hyper dual-update"
        )
