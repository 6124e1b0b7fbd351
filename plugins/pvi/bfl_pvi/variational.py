"""Partitioned variational inference with mean-field Gaussians.

Client k minimises, per sample (Ashman et al. 2022, eq. 6; Mildner et al. 2025, eq. 5),

    E_q[loss(y | x, w)] + (kl_weight / n_k) D(q || q_global / t_k)

over q = N(mean, sigma^2), from the server's posterior on. D is the Kullback-Leibler divergence, or
Renyi's of order `alpha`; the loss is that of the likelihood, which may be a robust one
(`--likelihood generalised-cross-entropy`). `bflcore.inference.sites` does the rest.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bflcore import SiteInference, VariationalInference, component, option
from bflcore.inference.memory import Memory
from bflcore.inference.variational import fit_gaussians
from bflcore.lazy import lazy
from bflcore.posteriors import Gaussian

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, Posterior, Problem
else:
    torch = lazy("torch")

__all__ = ["VariationalSites", "renyi", "renyi_gradient"]


@component
class VariationalSites(SiteInference, VariationalInference):
    """Fit a mean-field Gaussian against the cavity; each client's data count once.

    Minimises E_q[-log p(y | x, w)] per sample + kl_weight/n * D(q || cavity). With a `kl_weight`
    other than 1 the posterior is tempered: every client's likelihood counts 1/kl_weight times.
    """

    name = "variational-sites"
    reference = "Ashman et al. 2022, Algorithm 1; Bui et al. 2018; Mildner et al. 2025, eq. 5"
    hides = ("personal_prior",)

    damping: float = option(
        1.0, "share of its change that a client makes per round (rho)", above=0, at_most=1
    )
    momentum: float = option(
        0.0,
        "share of its last change of the mean that a client adds (with all clients per round)",
        at_least=0,
        below=1,
    )
    alpha: float = option(
        1.0,
        "order of Renyi's divergence from the cavity (1 = Kullback-Leibler)",
        above=0,
        at_most=1,
    )

    def tilt(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, cavity: Posterior
    ) -> tuple[Gaussian, Tensor]:
        """Return the clients' Gaussians ``[K, P]`` and their losses ``[K]``."""
        assert isinstance(cavity, Gaussian), "the registry admits no other family"  # noqa: S101
        divergence = None if self.alpha == 1 else partial(renyi_gradient, self.alpha)
        result = fit_gaussians(
            self, problem, broadcast, cohort, anchor=cavity, divergence=divergence
        )
        whole = result.posterior
        personal = Memory.unpack(result.memory, Gaussian).personal
        if problem.layout.personal_total and personal is not None:
            whole = whole.join(personal, problem.layout)
        assert isinstance(whole, Gaussian), "fit_gaussians gives Gaussians"  # noqa: S101
        return whole, result.loss


def renyi(alpha: float, q: Gaussian, p: Gaussian) -> Tensor:
    """Return Renyi's divergence of order `alpha` ``[...]`` in nats, summed over parameters.

    In the scaling of Knoblauch et al. 2022, D = log(E_p[(q/p)^alpha]) / (alpha (alpha - 1)), which
    tends to KL(q || p) as alpha tends to 1. Per coordinate, with s* = alpha s_p + (1 - alpha) s_q:

        (log s* - (1 - alpha) log s_q - alpha log s_p) / (2 alpha (1 - alpha)) + d^2 / (2 s*).
    """
    mixed = alpha * p.variance + (1 - alpha) * q.variance
    logs = mixed.log() - (1 - alpha) * q.variance.log() - alpha * p.variance.log()
    shift = (q.mean - p.mean).square() / mixed
    return 0.5 * (logs / (alpha * (1 - alpha)) + shift).sum(-1)


def renyi_gradient(
    alpha: float, mean: Tensor, sigma: Tensor, anchor: Gaussian
) -> tuple[Tensor, Tensor]:
    """Return the gradients ``[k, P]`` of `renyi` with respect to the mean and to log sigma."""
    variance, shift = sigma.square(), mean - anchor.mean
    mixed = alpha * anchor.variance + (1 - alpha) * variance
    ratio, pull = variance / mixed, shift / mixed
    return pull, (ratio - 1) / alpha - (1 - alpha) * variance * pull.square()
