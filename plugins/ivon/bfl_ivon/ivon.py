"""The inference `ivon`: the improved variational online Newton method (Shen et al. 2024).

It finds the mean-field Gaussian q = N(m, sigma^2) that minimises E_q[loss] + KL(q || prior)/lambda
with one gradient per step. In the paper's letters (Algorithm 1), with a gradient g^ at theta ~ q:

    h^ = g^ (theta - m) / sigma^2                                 Hessian by reparameterisation
    g  = beta1 g + (1 - beta1) g^
    h  = beta2 h + (1 - beta2) h^ + (1 - beta2)^2 (h - h^)^2 / (2 (h + delta))
    m  = m - alpha (g / (1 - beta1^t) + delta (m - m_0)) / (h + delta)
    sigma^2 = 1 / (lambda (h + delta))

The prior N(m_0, s_0) may differ from parameter to parameter: delta = 1/(lambda s_0), and the pull
is towards m_0 (Pal et al. 2025). lambda is the client's number of samples, divided by `kl_weight`.
The paper's h_0 is here the variance of the first posterior, 1/(lambda (h_0 + delta)), and as there,
alpha = lr (h_0 + delta).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from bfl_ivon.barycentre import GEOMETRIES, barycentre
from bfl_ivon.newton import Newton
from bfl_ivon.noise import WindowedNoise
from bflcore import Gaussian, VariationalInference, component, option
from bflcore.inference.gradient import Gradient, Trainable, batches, trainable_mask
from bflcore.inference.memory import OwnPosterior, client_posterior, join_personal, keep_own
from bflcore.inference.variational import gaussian_result, prior_of_cohort
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Posterior, Problem
else:
    torch = lazy("torch")

__all__ = ["Ivon", "train"]


@component
class Ivon(VariationalInference):
    """Fit a mean-field Gaussian by the improved variational online Newton method.

    Minimises E_q[-log p(y | x, w)] per sample + kl_weight/n * KL(q || prior), as `variational`
    does, with one gradient with respect to w per step.
    """

    name = "ivon"
    reference = (
        "Shen et al. 2024 (IVON), Algorithm 1; prior: Pal et al. 2025 (FedIvon); predictions: "
        "Jamoussi et al. 2025, cost-free personalisation"
    )
    hides = ("optimiser", "estimator")

    lr: float = option(
        0.1, "learning rate, relative to 1/variance of the first posterior (alpha)", above=0
    )
    momentum: float = option(0.9, "momentum of the gradient (beta1)", at_least=0, below=1)
    hessian_momentum: float = option(0.999, "momentum of the Hessian (beta2)", above=0, below=1)
    kl_weight: float = option(
        1.0, "weight of the KL term (the paper's lambda is n / kl_weight)", above=0
    )
    noise_windows: int = option(
        64,
        "steps per draw of the weight noise, each with another window of it (1 = new noise in "
        "each step)",
        at_least=1,
    )
    own_share: float = option(
        0.0,
        "share of the client's own posterior in that with which it predicts (0 = the server's, "
        "1 = its own)",
        at_least=0,
        at_most=1,
    )
    geometry: str = option(
        "reverse-kl",
        "how the server's posterior and the client's own are averaged to predict",
        choices=GEOMETRIES,
    )

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of a client that does not have a posterior of its own yet."""
        memory = super().initial_memory(problem)
        if not self.own_share:
            return memory
        return {**memory, **OwnPosterior.empty(self.initial(problem)).pack()}

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train every client's Gaussian from the broadcast."""
        return train(self, problem, broadcast, cohort)

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Average the server's posterior and each client's own, without training.

        Novel clients train first: all parameters if they predict with a posterior of their own,
        else the personal ones.
        """
        memory = dict(cohort.memory)
        if cohort.novel and (self.own_share or problem.layout.personal_total):
            trainable: Trainable = "all" if self.own_share else "personal"
            memory = dict(train(self, problem, broadcast, cohort, trainable).memory)
        if not self.own_share:
            return memory
        cohort = attrs.evolve(cohort, memory=memory)
        server = _gaussian(join_personal(problem, broadcast.start, cohort))
        # The server's posterior again for a client that does not have its own yet.
        own = _gaussian(client_posterior(problem, broadcast, cohort))
        mixed = barycentre(server, own, self.own_share, self.geometry)
        return {**memory, **mixed.pack("own.")}


def train(
    inference: Ivon,
    problem: Problem,
    broadcast: Broadcast,
    cohort: Cohort,
    trainable: Trainable = "all",
) -> LocalResult:
    """Fit every client's Gaussian ``[K, P]``; only the `trainable` parameters change."""
    start = _gaussian(join_personal(problem, broadcast.start, cohort))
    newton = Newton(
        start,
        prior_of_cohort(inference, problem, broadcast, cohort),
        [max(size, 1) / inference.kl_weight for size in cohort.sizes],
        lr=inference.lr_at(cohort.round) / inference.initial_sigma**2,
        momentum=inference.momentum,
        hessian_momentum=inference.hessian_momentum,
    )
    noise = WindowedNoise(cohort.streams("noise"), start.mean, inference.noise_windows)
    differentiate, mask = Gradient(problem), trainable_mask(problem, trainable)
    buffer = torch.empty_like(start.mean[:1])
    loss = start.mean.new_zeros(len(start.mean))
    for batch in batches(inference, cohort):
        k = len(batch.sizes)
        for _ in range(inference.draws):
            # Several networks are differentiated as one: their gradients are a new tensor anyway.
            out = buffer if k == 1 else None
            nll, gradient = differentiate(newton.draw(noise.rows(k)), batch, out=out)
            newton.observe(gradient, inference.draws)
            loss[:k].add_(nll, alpha=1 / inference.draws)
        newton.step()
        if mask is not None:
            newton.restore(start, mask < 1)
    result = gaussian_result(inference, problem, cohort, newton.posterior, loss)
    if not inference.own_share:
        return result
    return attrs.evolve(result, memory=keep_own(result.memory, newton.posterior))


def _gaussian(posterior: Posterior) -> Gaussian:
    assert isinstance(posterior, Gaussian), "the registry admits no other family"  # noqa: S101
    return posterior
