"""Mean-field variational inference.

q(w) = N(mean, sigma^2) minimises per sample

    E_q[-log p(y | x, w)] + (kl_weight / n) KL(q || prior)

(Blundell et al. 2015, eq. 2, divided by n) over the mean and rho = log sigma. (The papers write
sigma = softplus(rho); at their sigma of 0.05 the updates agree within 2 %, and the logarithm costs
one exponential per step instead of three.) The gradient of the expectation is estimated, that of
the KL term has a closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from bflcore.errors import OptionError
from bflcore.inference.gradient import (
    Batch,
    GradientInference,
    Trainable,
    batches,
    mean_loss,
    steps,
    trainable_mask,
)
from bflcore.inference.memory import (
    COMMON,
    Memory,
    client_posterior,
    join_personal,
    local_result,
)
from bflcore.inference.normals import Noise
from bflcore.lazy import lazy
from bflcore.messages import within
from bflcore.options import component, option
from bflcore.posteriors import Gaussian

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.inference import estimators
    from bflcore.inference.estimators import Estimator
    from bflcore.messages import Broadcast, Cohort, LocalResult
    from bflcore.posteriors import Posterior
    from bflcore.problem import Problem
    from bflcore.problem.likelihoods import Predictive
else:
    estimators = lazy("bflcore.inference.estimators")
    torch = lazy("torch")

__all__ = [
    "Objective",
    "Variational",
    "VariationalInference",
    "fit_gaussians",
    "mean_and_rho",
    "prior_of_cohort",
]

SMALLEST_SIGMA = 1e-8  # replaces a standard deviation of 0, which has no logarithm

# Called after each step with (mean, rho) ``[k, 2, P]`` of the clients that took it.
AfterStep = Callable[["Tensor"], None]
# The gradients ``[k, P]`` of a divergence from the anchor for the mean and log sigma of q.
Divergence = Callable[["Tensor", "Tensor", Gaussian], tuple["Tensor", "Tensor"]]


@component
class VariationalInference(GradientInference):
    """Base of mean-field variational inferences; subclasses define `fit`."""

    family = "gaussian"

    estimator: str = option(
        "local-reparameterisation",
        "estimator of the gradient of the expected log likelihood",
        choices=("reparameterisation", "local-reparameterisation", "flipout"),
    )
    draws: int = option(1, "Monte-Carlo draws per minibatch (M)", at_least=1)
    kl_weight: float = option(
        1.0, "weight of the KL term (beta, or zeta in some papers)", at_least=0
    )
    initial_sigma: float = option(
        0.0486, "initial standard deviation (0.0486 is rho = -3 in the papers)", above=0
    )
    prior_sigma: float | None = option(
        None, "standard deviation of a zero-mean first prior (none: the initial posterior)", above=0
    )
    personal_prior: str = option(
        "initial",
        "prior of the personal parameters: the first prior, the client's previous posterior, or "
        "`common`, the pool of all clients' posteriors, which clients then send",
        choices=("initial", "previous", "common"),
    )
    predict_draws: int = option(50, "parameter draws averaged per prediction (S)", at_least=1)

    def initial(self, problem: Problem) -> Gaussian:
        """Return N(network's initialisation, initial_sigma^2) ``[P]``."""
        variance = torch.full_like(problem.initial, self.initial_sigma**2)
        return Gaussian(problem.initial, variance)

    def prior(self, problem: Problem) -> Gaussian:
        """Return the first prior ``[P]``: N(0, prior_sigma^2), or the initial posterior."""
        if self.prior_sigma is None:
            return self.initial(problem)
        variance = torch.full_like(problem.initial, self.prior_sigma**2)
        return Gaussian(torch.zeros_like(problem.initial), variance)

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Fit the personal parameters of novel clients; the shared posterior stays fixed."""
        if not cohort.novel or not problem.layout.personal_total:
            return cohort.memory
        return fit_gaussians(self, problem, broadcast, cohort, trainable="personal").memory

    def predict(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Predictive:
        """Average over `predict_draws` parameter draws, the same for all samples of a client."""
        whole = client_posterior(problem, broadcast, cohort)
        noise, out = Noise(cohort.streams("predict")), torch.empty_like(whole.mean)
        # One draw at a time: its weights stay in cache, and memory does not grow with the draws.
        drawn = (whole.sample(noise.fill(out)) for _ in range(self.predict_draws))
        outputs = [problem.forward(weights, x) for weights in drawn]
        return problem.likelihood.predictive(torch.stack(outputs, dim=1))


@component
class Variational(VariationalInference):
    """Fit a mean-field Gaussian by stochastic variational inference.

    Minimises E_q[-log p(y | x, w)] per sample + kl_weight/n * KL(q || prior).
    """

    name = "variational"
    reference = "Blundell et al. 2015, eq. 2; Kingma et al. 2015, eq. 6; Wen et al. 2018, eq. 4"

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train every client's Gaussian from the broadcast."""
        return fit_gaussians(self, problem, broadcast, cohort)


def prior_of_cohort(
    inference: VariationalInference, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> Gaussian:
    """Return the prior of all parameters ``[K, P]``: the broadcast one, and each client's own.

    Raises `OptionError` if the server did not pool the clients' personal posteriors.
    """
    if problem.layout.personal_total and inference.personal_prior != "previous":
        personal = inference.prior(problem).split(problem.layout)[1]
        if inference.personal_prior == "common" and broadcast.round:
            personal = _common(broadcast)
        memory = Memory(personal=personal.map(lambda t: t.expand(len(cohort.clients), -1)))
        cohort = attrs.evolve(cohort, memory=memory.pack())
    return _gaussian(join_personal(problem, broadcast.prior, cohort))


def fit_gaussians(
    inference: VariationalInference,
    problem: Problem,
    broadcast: Broadcast,
    cohort: Cohort,
    trainable: Trainable = "all",
    after_step: AfterStep | None = None,
    anchor: Gaussian | None = None,
    divergence: Divergence | None = None,
) -> LocalResult:
    """Fit every client's Gaussian ``[K, P]``; only the `trainable` parameters change.

    `anchor` ``[K, P]`` replaces the prior in the KL term, and `divergence` the KL; `after_step` is
    called after each step and may change the anchor in place.
    """
    theta = mean_and_rho(_gaussian(join_personal(problem, broadcast.start, cohort)))  # [K, 2, P]
    anchor = anchor or prior_of_cohort(inference, problem, broadcast, cohort)
    objective = Objective(inference, problem, cohort, anchor, divergence)
    optimiser = inference.update_rule(theta, cohort)
    mask = trainable_mask(problem, trainable)
    loss = theta.new_zeros(len(theta))
    for batch in batches(inference, cohort):
        k = len(batch.sizes)
        nll, gradient = objective(theta[:k], batch)
        optimiser.step(gradient if mask is None else gradient.mul_(mask))
        loss[:k] += nll
        if after_step is not None:
            after_step(theta[:k])
            objective.read_anchor()
    posterior = Gaussian(theta[:, 0], (2 * theta[:, 1]).exp())
    sent: Mapping[str, Tensor] = {}
    if inference.personal_prior == "common" and problem.layout.personal_total:
        sent = Memory(personal=posterior.split(problem.layout)[1]).pack()
    mean = mean_loss(loss, steps(inference, cohort))
    return local_result(problem, cohort, posterior, mean, sent)


def mean_and_rho(posterior: Gaussian) -> Tensor:
    """Return (mean, rho) ``[K, 2, P]`` of Gaussians ``[K, P]``, where rho = log sigma."""
    rho = posterior.variance.sqrt().clamp_min(SMALLEST_SIGMA).log()
    return torch.stack([posterior.mean, rho], dim=1)


class Objective:
    """The gradient of E_q[-log p(y | x, w)] + (kl_weight / n) D(q || anchor), client by client.

    D is the KL divergence, unless its gradient is given as `divergence`.

    The anchor ``[K, P]`` may change in place; call `read_anchor` afterwards.
    """

    def __init__(
        self,
        inference: VariationalInference,
        problem: Problem,
        cohort: Cohort,
        anchor: Gaussian,
        divergence: Divergence | None = None,
    ) -> None:
        self._expected = estimators.estimator(
            inference.estimator, problem, cohort.streams("noise"), cohort.x[0, :1]
        )
        self._draws, self._anchor, self._divergence = inference.draws, anchor, divergence
        self._scale = inference.kl_weight / anchor.mean.new_tensor(cohort.sizes)[:, None]  # [K, 1]
        # These buffers are reused in all steps: allocating memory costs more than the arithmetic.
        self._weight, self._sigma = (torch.empty_like(anchor.variance) for _ in range(2))
        self._gradient = torch.stack([self._weight, self._sigma], dim=1)
        self.read_anchor()

    def read_anchor(self) -> None:
        """Take over the anchor's variances."""
        torch.div(self._scale, self._anchor.variance, out=self._weight)

    def __call__(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return E_q[NLL] ``[k]`` and the gradient ``[k, 2, P]`` at `theta`, the (mean, rho) of q.

        The next call overwrites the gradient.
        """
        k = len(theta)
        mean, sigma, gradient = theta[:, 0], self._sigma[:k], self._gradient[:k]
        scale, weight = self._scale[:k], self._weight[:k]
        torch.exp(theta[:, 1], out=sigma)
        nll, d_mean, d_rho = _average(self._expected, self._draws, mean, sigma, batch)
        if self._divergence is not None:
            pull, push = self._divergence(mean, sigma, self._anchor[:k])
            torch.addcmul(d_mean, pull, scale, out=gradient[:, 0])
            torch.addcmul(d_rho, push, scale, out=gradient[:, 1])
            return nll, gradient
        # d KL / d mean = (mean - m) / s^2;  d KL / d rho = sigma^2 / s^2 - 1
        shift = torch.sub(mean, self._anchor.mean[:k], out=gradient[:, 1])
        torch.addcmul(d_mean, shift, weight, out=gradient[:, 0])
        torch.addcmul(d_rho.sub_(scale), sigma.square_(), weight, out=gradient[:, 1])
        return nll, gradient


def _average(
    expected: Estimator, draws: int, mean: Tensor, sigma: Tensor, batch: Batch
) -> Sequence[Tensor]:
    """Average the estimates of several draws; an estimator may reuse the tensors it returned."""
    first = expected(mean, sigma, batch)
    if draws == 1:
        return first
    totals = [estimate / draws for estimate in first]
    for _ in range(draws - 1):
        for total, estimate in zip(totals, expected(mean, sigma, batch), strict=True):
            total.add_(estimate, alpha=1 / draws)
    return totals


def _common(broadcast: Broadcast) -> Gaussian:
    if not (found := within(broadcast.hyper, COMMON)):
        raise OptionError(
            "inference.personal_prior: common is not allowed with this --hyper, which does not "
            "pool the clients' posteriors; allowed: --hyper continual, empirical-bayes or fixed"
        )
    return Gaussian.unpack(found)


def _gaussian(posterior: Posterior) -> Gaussian:
    assert isinstance(posterior, Gaussian), "the registry admits no other family"  # noqa: S101
    return posterior
