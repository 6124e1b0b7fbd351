"""A client's round of FedSI, its personalisation and its predictions (Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bfl_fedsi import laplace
from bflcore import Gaussian, GaussianNoise, Map, Predictive
from bflcore.inference.gradient import Gradient, Optimiser, batches, mean_loss, steps
from bflcore.inference.memory import join_personal, local_result
from bflcore.inference.point import fit_points
from bflcore.options import build

if TYPE_CHECKING:
    from bfl_fedsi.laplace import Subnetwork
    from bfl_fedsi.plugin import SubnetworkLaplace
    from bflcore import Broadcast, Cohort, LocalResult, Posterior, Problem

__all__ = ["fit", "initial", "personalise", "predict"]

PARTS = ("index", "base", "factor", "sign")  # of a subnetwork, in a client's memory


def initial(inference: SubnetworkLaplace, problem: Problem) -> Gaussian:
    """Return N(initialisation, alpha) ``[P]``, of variance 0 where parameters do not travel."""
    layout = problem.layout
    own = problem.initial.new_zeros(layout.personal_total)
    alpha = problem.initial.new_full((layout.shared_total,), inference.prior_variance)
    return Gaussian(problem.initial, layout.join(alpha, own))


def fit(
    inference: SubnetworkLaplace, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> LocalResult:
    """Run a client's round: MAP, selection, inference, and the variances that travel."""
    weights, loss = maximum_a_posteriori(inference, problem, broadcast, cohort)
    g = prior_variance(inference, broadcast)
    noise = likelihood_noise(problem, len(weights))
    found = subnetworks(inference, problem, weights, g, cohort, noise, inference.select)
    variances = torch.stack([one.variance for one in found])
    own = weights.new_zeros(len(weights), problem.layout.personal_total)
    posterior = Gaussian(weights, problem.layout.join(variances, own))
    return local_result(problem, cohort, posterior, loss)


def prior_variance(inference: SubnetworkLaplace, broadcast: Broadcast) -> Tensor:
    """Return g ``[R]``: the prior's variances, alpha where they are zero."""
    assert isinstance(broadcast.prior, Gaussian)  # noqa: S101 - the registry admits no other
    variance = broadcast.prior.variance
    return variance.masked_fill(variance == 0, inference.prior_variance)


def maximum_a_posteriori(
    inference: SubnetworkLaplace, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> tuple[Tensor, Tensor]:
    """Return every client's MAP ``[K, P]``, personal parameters unmoved, and its loss ``[K]``.

    Minimises the mean NLL per sample + sum_r (theta_r - mu_r)^2 / (2 g_r n), eq. 10 over n.
    """
    layout, clients = problem.layout, len(cohort.clients)
    weights = join_personal(problem, broadcast.start, cohort.memory, clients).mean.clone()
    prior = join_personal(problem, broadcast.prior, cohort.memory, clients).mean
    own = weights.new_zeros(layout.personal_total)
    moves = layout.join(weights.new_ones(layout.shared_total), own)
    sizes = torch.tensor(cohort.sizes, dtype=weights.dtype, device=weights.device)[:, None]
    pull = layout.join(1 / prior_variance(inference, broadcast), own) / sizes
    taken = steps(inference, cohort)
    optimiser = Optimiser(inference, weights, taken, broadcast.round)
    differentiate = Gradient(problem)
    loss = weights.new_zeros(clients)
    for batch in batches(inference, cohort):
        k = len(batch.sizes)
        nll, gradient = differentiate(weights[:k], batch)
        optimiser.step(gradient.mul_(moves).addcmul_(weights[:k] - prior[:k], pull[:k]))
        loss[:k] += nll
    return weights, mean_loss(loss, taken)


def subnetworks(
    inference: SubnetworkLaplace,
    problem: Problem,
    weights: Tensor,
    g: Tensor,
    cohort: Cohort,
    noise: Tensor,
    rule: str,
) -> list[Subnetwork]:
    """Infer every client's subnetwork at `weights` ``[K, P]``; `noise` ``[K]`` of a regression."""
    members = zip(cohort.sizes, cohort.streams("subnetwork"), strict=True)
    return [
        laplace.infer(
            inference, problem, weights[k], cohort.x[k, :size], noise[k], g, generator, rule
        )
        for k, (size, generator) in enumerate(members)
    ]


def likelihood_noise(problem: Problem, clients: int) -> Tensor:
    """Return the likelihood's noise variance for each client ``[K]``; 1 for classes (unused)."""
    likelihood = problem.likelihood
    known = likelihood.noise_variance if isinstance(likelihood, GaussianNoise) else 1.0
    return problem.initial.new_full((clients,), known)


def personalise(
    inference: SubnetworkLaplace, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> Mapping[str, Tensor]:
    """Fine-tune personal parameters under the global mean, then infer the subnetwork there."""
    memory = fine_tuned(inference, problem, broadcast, cohort)
    clients = len(cohort.clients)
    weights = join_personal(problem, broadcast.start, memory, clients).mean
    noise = likelihood_noise(problem, clients)
    if inference.noise == "learned" and isinstance(problem.likelihood, GaussianNoise):
        noise = learned_noise(problem, weights, cohort)
    memory = {**memory, "noise": noise}
    if inference.predictive == "mean":
        return memory
    g = prior_variance(inference, broadcast)
    rule = inference.predict_select
    return memory | _packed(subnetworks(inference, problem, weights, g, cohort, noise, rule))


def fine_tuned(
    inference: SubnetworkLaplace, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> Mapping[str, Tensor]:
    """Return the memory ``[K, ...]`` with personal parameters fitted to the client's data."""
    if not (problem.layout.personal_total and inference.head_epochs):
        return cohort.memory
    settings = {
        "lr": inference.head_lr,
        "local_epochs": inference.head_epochs,
        "batch_size": inference.batch_size,
        "weight_decay": inference.head_weight_decay,
    }
    tuner = build(Map, settings, "inference")
    return fit_points(tuner, problem, broadcast, cohort, "personal").memory


def learned_noise(problem: Problem, weights: Tensor, cohort: Cohort) -> Tensor:
    """Return each client's mean squared residual on its training targets ``[K]``."""
    with torch.no_grad():
        residual = (problem.forward(weights, cohort.x) - cohort.y).square().mean(2)
    found = torch.stack([row[:n].mean() for row, n in zip(residual, cohort.sizes, strict=True)])
    return found.clamp_min(torch.finfo(found.dtype).eps)


def _packed(found: list[Subnetwork]) -> dict[str, Tensor]:
    """Stack subnetworks, their factors padded with rows of zeros to the longest."""
    factors = torch.nn.utils.rnn.pad_sequence([one.factor for one in found], batch_first=True)
    return {
        "subnetwork.index": torch.stack([one.index for one in found]),
        "subnetwork.base": torch.stack([one.base for one in found]),
        "subnetwork.factor": factors,
        "subnetwork.sign": factors.new_tensor([one.sign for one in found]),
    }


def _unpacked(memory: Mapping[str, Tensor], posterior: Posterior, client: int) -> Subnetwork:
    """Return a client's subnetwork; without one, the server's own variances (global model)."""
    if "subnetwork.index" in memory:
        part = {name: memory[f"subnetwork.{name}"][client] for name in PARTS}
        return laplace.Subnetwork(part["index"], part["base"], part["factor"], float(part["sign"]))
    assert isinstance(posterior, Gaussian)  # noqa: S101 - the registry admits no other
    none = posterior.mean.new_zeros(0, dtype=torch.int64)
    return laplace.Subnetwork(none, posterior.variance, posterior.mean.new_zeros(0, 0), 1.0)


def predict(
    inference: SubnetworkLaplace,
    problem: Problem,
    posterior: Posterior,
    memory: Mapping[str, Tensor],
    x: Tensor,
    streams: list[torch.Generator],
) -> Predictive:
    """Predict with N(f, J_S H^-1 J_S^T) over the outputs (eq. 17-19)."""
    clients = len(x)
    weights = join_personal(problem, posterior, memory, clients).mean
    noise = memory.get("noise", likelihood_noise(problem, clients))
    if inference.predictive == "mean":
        return _predictive(problem, problem.forward(weights, x)[:, None], noise)
    moments = [
        laplace.linearised(problem, weights[k], _unpacked(memory, posterior, k), x[k])
        for k in range(clients)
    ]
    mean = torch.stack([one for one, _ in moments])
    covariance = torch.stack([one for _, one in moments])
    if inference.predictive == "mc":
        draws = sampled(mean, covariance, inference.predict_draws, streams)
        return _predictive(problem, draws, noise)
    variance = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    if isinstance(problem.likelihood, GaussianNoise):
        # Two draws of this mean and this variance: a Gaussian's first two moments.
        spread = variance.sqrt()
        return _predictive(problem, torch.stack([mean - spread, mean + spread], dim=1), noise)
    # softmax(f / sqrt(1 + pi/8 diag)): eq. 18 with a normalised link (MacKay 1992)
    return _predictive(problem, (mean / (1 + math.pi / 8 * variance).sqrt())[:, None], noise)


def sampled(mean: Tensor, covariance: Tensor, draws: int, streams: list[torch.Generator]) -> Tensor:
    """Return draws of the outputs ``[K, S, B, O]`` from their Gaussians."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt()[..., None, :]  # [K, B, O, O]
    shape = (draws, *mean.shape[1:])
    noise = torch.stack(
        [
            torch.randn(shape, generator=stream, dtype=mean.dtype, device=mean.device)
            for stream in streams
        ]
    )
    drawn: Tensor = mean[:, None] + (root[:, None] @ noise[..., None])[..., 0]
    return drawn


def _predictive(problem: Problem, outputs: Tensor, noise: Tensor) -> Predictive:
    if isinstance(problem.likelihood, GaussianNoise):
        return Predictive(outputs, noise[:, None, None])
    return problem.likelihood.predictive(outputs)
