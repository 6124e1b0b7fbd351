"""Mean-field variational inference: the numerics of the inference `variational`.

q(w) = N(mean, sigma^2) minimises per sample

    E_q[-log p(y | x, w)] + (kl_weight / n) KL(q || prior)

(Blundell et al. 2015, eq. 2, divided by n) over the mean and rho = log sigma. (The papers write
sigma = softplus(rho); at their sigma of 0.05 the two move alike to 2 %, and the logarithm costs
one exponential a step instead of three.) The expectation's gradient comes from an estimator, the
KL's in closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bflcore import training
from bflcore.estimators import Estimator, Gradients, estimator
from bflcore.inference import PERSONAL
from bflcore.noise import Noise
from bflcore.posteriors import Gaussian

if TYPE_CHECKING:
    from bflcore.inference import Broadcast, Cohort, LocalResult, Part, VariationalInference
    from bflcore.likelihoods import Predictive
    from bflcore.posteriors import Posterior
    from bflcore.problem import Problem

__all__ = ["fit", "initial", "predict", "prior", "prior_of_cohort"]

SMALLEST_SIGMA = 1e-8  # a zero variance starts here: it has no logarithm

# Called after each step with (mean, rho) ``[k, 2, P]`` of the clients that took it.
AfterStep = Callable[[Tensor], None]


def initial(inference: VariationalInference, problem: Problem) -> Gaussian:
    """Return N(network's initialisation, initial_sigma^2) ``[P]``."""
    variance = torch.full_like(problem.initial, inference.initial_sigma**2)
    return Gaussian(problem.initial, variance)


def prior(inference: VariationalInference, problem: Problem) -> Gaussian:
    """Return the first prior ``[P]``."""
    if inference.prior_sigma is None:
        return initial(inference, problem)
    zeros = torch.zeros_like(problem.initial)
    return Gaussian(zeros, zeros + inference.prior_sigma**2)


def prior_of_cohort(
    inference: VariationalInference, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> Gaussian:
    """Join the broadcast prior with each client's over its personal coordinates ``[K, P]``."""
    memory = cohort.memory
    if problem.layout.personal_total and inference.personal_prior == "initial":
        own = prior(inference, problem).split(problem.layout)[1]
        memory = own.map(lambda t: t.expand(len(cohort.clients), -1)).pack(PERSONAL)
    return _gaussian(training.joined(problem, broadcast.prior, memory, len(cohort.clients)))


def fit(
    inference: VariationalInference,
    problem: Problem,
    broadcast: Broadcast,
    cohort: Cohort,
    part: Part = "all",
    after_step: AfterStep | None = None,
    anchor: Gaussian | None = None,
) -> LocalResult:
    """Fit every client's Gaussian; ``part = "personal"`` moves the personal coordinates alone.

    `anchor` ``[K, P]`` replaces the prior of the KL term; `after_step` is called after each step
    and may change the anchor in place.
    """
    clients = len(cohort.clients)
    start = _gaussian(training.joined(problem, broadcast.start, cohort.memory, clients))
    anchor = anchor or prior_of_cohort(inference, problem, broadcast, cohort)
    rho = start.variance.sqrt().clamp_min(SMALLEST_SIGMA).log()
    theta = torch.stack([start.mean, rho], dim=1)  # [K, 2, P]
    taken = training.steps(inference, cohort)
    optimiser = training.Optimiser(inference, theta, taken, broadcast.round)
    moves = training.moving(problem, part)
    expected = estimator(inference.estimator, problem, cohort.streams("noise"), cohort.x[0, :1])
    sizes = torch.tensor(cohort.sizes, dtype=theta.dtype, device=theta.device)[:, None]
    scale = inference.kl_weight / sizes  # [K, 1]
    weight = scale / anchor.variance  # [K, P]
    loss = theta.new_zeros(clients)
    # Buffers live as long as the round: fresh memory costs more than the arithmetic in it.
    gradients, sigmas = torch.empty_like(theta), torch.empty_like(weight)
    for batch in training.batches(inference, cohort):
        k = len(batch.sizes)
        mean, sigma, gradient = theta[:k, 0], sigmas[:k], gradients[:k]
        torch.exp(theta[:k, 1], out=sigma)
        nll, d_mean, d_rho = _average(expected, inference.draws, mean, sigma, batch)
        # d KL / d mean = (mean - m) / s^2;  d KL / d rho = sigma^2 / s^2 - 1
        shift = torch.sub(mean, anchor.mean[:k], out=gradient[:, 1])
        torch.addcmul(d_mean, shift, weight[:k], out=gradient[:, 0])
        torch.addcmul(d_rho.sub_(scale[:k]), sigma.square_(), weight[:k], out=gradient[:, 1])
        optimiser.step(gradient if moves is None else gradient.mul_(moves))
        loss[:k] += nll
        if after_step is not None:
            after_step(theta[:k])
            weight = scale / anchor.variance
    posterior = Gaussian(theta[:, 0], (2 * theta[:, 1]).exp())
    return training.result(problem, cohort, posterior, training.mean_loss(loss, taken))


def predict(
    inference: VariationalInference,
    problem: Problem,
    posterior: Posterior,
    memory: Mapping[str, Tensor],
    x: Tensor,
    streams: list[torch.Generator],
) -> Predictive:
    """Predict with `predict_draws` draws of the parameters, shared by all samples of a client."""
    whole = _gaussian(training.predicting(problem, posterior, memory, len(x)))
    draws = inference.predict_draws
    noise = Noise(streams).fill(whole.mean.new_empty(len(x), draws, whole.mean.shape[-1]))
    weights = whole.map(lambda tensor: tensor[:, None]).sample(noise)
    return problem.likelihood.predictive(problem.outputs(weights, x))


def _average(
    expected: Estimator, draws: int, mean: Tensor, sigma: Tensor, batch: training.Batch
) -> Gradients:
    """Average the estimates of several draws; an estimator may reuse what it returned before."""
    estimate = expected(mean, sigma, batch)
    if draws == 1:
        return estimate
    nll, d_mean, d_rho = (part / draws for part in estimate)
    for _ in range(draws - 1):
        more = expected(mean, sigma, batch)
        for total, part in zip((nll, d_mean, d_rho), more, strict=True):
            total.add_(part, alpha=1 / draws)
    return nll, d_mean, d_rho


def _gaussian(posterior: Posterior) -> Gaussian:
    assert isinstance(posterior, Gaussian), "the registry admits no other family"  # noqa: S101
    return posterior
