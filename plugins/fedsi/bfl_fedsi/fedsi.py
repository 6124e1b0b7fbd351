"""FedSI: federated learning with subnetwork inference (Chen, Liu, Wu, Fan & Cao 2024, Algorithm 1).

The body is shared, the head is personal. A client finds a MAP estimate of the body with the
server's posterior as prior, and a Gaussian over a small subnetwork of it by linearised Laplace.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from bfl_fedsi import laplace
from bfl_fedsi.laplace import Subnetwork
from bflcore import (
    Categorical,
    Gaussian,
    GaussianNoise,
    GradientInference,
    Map,
    OptionError,
    Predictive,
    component,
    option,
)
from bflcore.inference.gradient import Gradient
from bflcore.inference.memory import Memory, join_personal, local_result
from bflcore.inference.point import descend, fit_points
from bflcore.lazy import lazy
from bflcore.options import build

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Posterior, Problem
    from bflcore.inference.gradient import Batch
else:
    torch = lazy("torch")

__all__ = [
    "SubnetworkLaplace",
    "SubnetworkMemory",
    "available_memory",
    "likelihood_noise",
    "residual_variance",
    "substitute_alpha",
]

SELECTIONS = ("variance", "curvature-aware", "informative", "random")


@attrs.frozen(eq=False, kw_only=True)
class SubnetworkMemory(Memory):
    """What clients need to predict ``[K, ...]``: the noise of a regression, and their subnetworks.

    Factors are padded with rows of zeros to equal length.
    """

    noise: Tensor | None = None  # [K]
    index: Tensor | None = None  # these four as in `Subnetwork`
    base: Tensor | None = None
    factor: Tensor | None = None
    sign: Tensor | None = None

    @classmethod
    def of(cls, noise: Tensor, subnetworks: list[Subnetwork]) -> SubnetworkMemory:
        """Stack the clients' subnetworks; `noise` ``[K]``."""
        factors = [one.factor for one in subnetworks]
        return cls(
            noise=noise,
            index=torch.stack([one.index for one in subnetworks]),
            base=torch.stack([one.base for one in subnetworks]),
            factor=torch.nn.utils.rnn.pad_sequence(factors, batch_first=True),
            sign=noise.new_tensor([one.sign for one in subnetworks]),
        )

    def subnetwork(self, client: int) -> Subnetwork | None:
        """Return the subnetwork of row `client`; None if subnetworks have not been inferred."""
        if self.index is None or self.base is None or self.factor is None or self.sign is None:
            return None
        return Subnetwork(
            self.index[client], self.base[client], self.factor[client], float(self.sign[client])
        )


@component
class SubnetworkLaplace(GradientInference):
    """Fit a MAP, then a full-covariance Gaussian over a small subnetwork by linearised Laplace.

    Clients send the MAP estimate and the variance of every shared parameter; the variance is 0
    outside the subnetwork. Personal parameters keep their initial values during training and are
    fine-tuned on the client's own data before it predicts.
    """

    name = "subnetwork-laplace"
    family = "gaussian"
    reference = "Chen et al. 2024 (FedSI), eq. 10, 14, 15, 17-19; Daxberger et al. 2021"
    expected_failures = MappingProxyType(
        {
            "no data gives the prior back": "the variance that clients send is 0 outside the "
            "subnetwork, even without data (step 4 of Algorithm 1)"
        }
    )

    prior_variance: float = option(
        1e-4, "initial prior variance (alpha), also used where the prior's variance is 0", above=0
    )
    fraction: float = option(
        0.05, "fraction of the shared parameters in the subnetwork (E)", above=0, at_most=1
    )
    select: str = option(
        "variance",
        "subnetwork of a round: `variance` (largest posterior variances, eq. 14), "
        "`curvature-aware` (the same among parameters with curvature), `informative` (largest "
        "curvature x variance) or `random`",
        choices=SELECTIONS,
    )
    predict_select: str = option(
        "variance", "subnetwork used for prediction (see select)", choices=SELECTIONS
    )
    covariance: str = option(
        "auto",
        "form of the covariance: `primal` (over parameters), `dual` (over samples), `auto` (the "
        "smaller of the two), or `diagonal` (no correlations)",
        choices=("auto", "primal", "dual", "diagonal"),
    )
    predictive: str = option(
        "probit",
        "predictive distribution: `probit` (closed form; draws only divide its uncertainty into "
        "aleatoric and epistemic), `mc` (mean over draws of the linearised outputs) or `mean` (no "
        "uncertainty)",
        choices=("probit", "mc", "mean"),
    )
    predict_draws: int = option(50, "number of draws of the linearised outputs", at_least=1)
    head_epochs: int = option(
        10, "fine-tuning epochs of the personal parameters before each evaluation", at_least=0
    )
    head_lr: float = option(1e-2, "learning rate of fine-tuning", above=0)
    head_weight_decay: float = option(
        0.0, "strength of the quadratic penalty around zero in fine-tuning", at_least=0
    )
    noise: str = option(
        "learned",
        "noise variance of a regression: `learned` (each client's mean squared residual after "
        "fine-tuning) or `likelihood`",
        choices=("learned", "likelihood"),
    )

    def check(self, problem: Problem) -> None:
        """Raise `OptionError` without shared parameters, known curvature or sufficient memory."""
        if not problem.layout.shared_total:
            raise OptionError(
                "--share: the network does not have shared parameters (share is none, or the head "
                "is the whole network), so there is nothing to infer; allowed: share all, or a "
                "model with layers before its head"
            )
        if not isinstance(problem.likelihood, Categorical | GaussianNoise):
            raise OptionError(
                f"--likelihood: {problem.likelihood.name} has no known curvature for "
                f"{self.name}; allowed: {Categorical.name}, {GaussianNoise.name}"
            )
        needed, free = self.bytes_needed(problem), available_memory(problem.device)
        if needed > free:
            raise OptionError(
                f"inference.fraction: a subnetwork of {self.size(problem):,} parameters takes "
                f"{needed / 2**30:.1f} GiB per client, the machine has {free / 2**30:.1f} GiB; "
                "lower inference.fraction, or set inference.covariance=diagonal"
            )

    @property
    def leaves_certain(self) -> bool:
        """Whether variances outside the subnetwork are 0: unless it is the whole network."""
        return self.fraction < 1

    def size(self, problem: Problem) -> int:
        """Return the size of the subnetwork, |S| = E |R|, rounded, at least 1."""
        return max(1, round(self.fraction * problem.layout.shared_total))

    def bytes_needed(self, problem: Problem) -> int:
        """Return an upper bound on the bytes that the inference of one client needs."""
        if self.covariance == "diagonal":
            return 0
        with torch.no_grad():
            outputs = problem.forward(problem.initial[None], problem.train.x[None, :1]).shape[-1]
        rows = outputs * max(map(problem.train.size, range(len(problem.train.start))))
        numbers = laplace.numbers_held(self.covariance, rows, self.size(problem))
        return numbers * problem.initial.element_size()

    def initial(self, problem: Problem) -> Posterior:
        """Return N(initialisation, alpha) ``[P]``; personal parameters have variance 0."""
        layout = problem.layout
        certain = problem.initial.new_zeros(layout.personal_total)
        alpha = problem.initial.new_full((layout.shared_total,), self.prior_variance)
        return Gaussian(problem.initial, layout.join(alpha, certain))

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Run a round of each client: MAP (eq. 10), selection (eq. 14) and inference (eq. 15)."""
        weights, loss = self.maximum_a_posteriori(problem, broadcast, cohort)
        noise = likelihood_noise(problem, len(weights))
        found = self.subnetworks(problem, broadcast, cohort, weights, noise, self.select)
        variances = torch.stack([one.variance for one in found])
        certain = weights.new_zeros(len(weights), problem.layout.personal_total)
        posterior = Gaussian(weights, problem.layout.join(variances, certain))
        return local_result(problem, cohort, posterior, loss)

    def maximum_a_posteriori(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> tuple[Tensor, Tensor]:
        """Return each client's MAP ``[K, P]`` with fixed personal parameters, and its loss ``[K]``.

        Minimises the mean NLL per sample + sum_r (theta_r - mu_r)^2 / (2 g_r n), eq. 10 over n.
        """
        start = join_personal(problem, broadcast.start, cohort).mean
        prior = join_personal(problem, broadcast.prior, cohort).mean
        g = substitute_alpha(broadcast.prior, self.prior_variance)
        free = g.new_zeros(problem.layout.personal_total)
        sizes = torch.tensor(cohort.sizes, dtype=g.dtype, device=g.device)[:, None]
        precision = problem.layout.join(1 / g, free) / sizes  # [K, P], per sample
        differentiate = Gradient(problem)

        def loss_and_gradient(w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            k = len(w)
            nll, gradient = differentiate(w, batch)
            return nll, gradient.addcmul_(w - prior[:k], precision[:k])

        return descend(self, problem, cohort, start, loss_and_gradient, "shared")

    def subnetworks(
        self,
        problem: Problem,
        broadcast: Broadcast,
        cohort: Cohort,
        weights: Tensor,
        noise: Tensor,
        rule: str,
    ) -> list[Subnetwork]:
        """Infer each client's subnetwork at `weights` ``[K, P]``; `noise` variances ``[K]``."""
        g = substitute_alpha(broadcast.prior, self.prior_variance)
        members = zip(cohort.sizes, cohort.streams("subnetwork"), strict=True)
        return [
            self.subnetwork(problem, weights[k], cohort.x[k, :size], noise[k], g, rule, stream)
            for k, (size, stream) in enumerate(members)
        ]

    def subnetwork(
        self,
        problem: Problem,
        weights: Tensor,
        x: Tensor,
        noise: Tensor,
        g: Tensor,
        rule: str,
        stream: torch.Generator,
    ) -> Subnetwork:
        """Select a subnetwork at `weights` ``[P]`` by `rule` and infer its posterior.

        `x` ``[N, ...]``, `noise` ``[]``; `g` ``[R]`` are the prior variances.
        """
        h = laplace.diagonal(problem, weights, x, noise)
        index = laplace.select(rule, h, g, self.size(problem), stream)
        if self.covariance == "diagonal":
            return laplace.infer_diagonal(h, g, index)
        return laplace.infer(problem, weights, x, noise, g, index, self.covariance)

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Fine-tune the personal parameters given the global mean, then infer the subnetwork."""
        cohort = attrs.evolve(cohort, memory=self.fine_tune(problem, broadcast, cohort))
        weights = join_personal(problem, broadcast.start, cohort).mean
        noise = likelihood_noise(problem, len(weights))
        if self.noise == "learned" and isinstance(problem.likelihood, GaussianNoise):
            noise = residual_variance(problem, weights, cohort)
        if self.predictive == "mean":
            return {**cohort.memory, **SubnetworkMemory(noise=noise).pack()}
        found = self.subnetworks(problem, broadcast, cohort, weights, noise, self.predict_select)
        return {**cohort.memory, **SubnetworkMemory.of(noise, found).pack()}

    def fine_tune(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Return the memory ``[K, ...]`` with personal parameters fitted to the clients' data."""
        if not (problem.layout.personal_total and self.head_epochs):
            return cohort.memory
        options = {
            "lr": self.head_lr,
            "local_epochs": self.head_epochs,
            "batch_size": self.batch_size,
            "weight_decay": self.head_weight_decay,
        }
        tuner = build(Map, options, "inference")
        return fit_points(tuner, problem, broadcast, cohort, "personal").memory

    def predict(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Predictive:
        """Predict with N(f, J_S H^-1 J_S^T) over the outputs (eq. 17-19).

        A client without a subnetwork uses the server's variances (the global model).
        """
        weights = join_personal(problem, broadcast.start, cohort).mean
        memory = SubnetworkMemory.unpack(cohort.memory, Gaussian)
        noise = likelihood_noise(problem, len(x)) if memory.noise is None else memory.noise
        if self.predictive == "mean":
            return _predictive(problem, problem.forward(weights, x)[:, None], noise)
        servers = laplace.factorised(_gaussian(broadcast.start).variance)
        moments = [
            laplace.linearise(problem, weights[k], memory.subnetwork(k) or servers, x[k])
            for k in range(len(x))
        ]
        mean = torch.stack([one for one, _ in moments])  # [K, B, O]
        covariance = torch.stack([one for _, one in moments])  # [K, B, O, O]
        variance = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0)
        probit = self.predictive == "probit"
        if probit and isinstance(problem.likelihood, GaussianNoise):
            return _predictive(problem, laplace.match_moments(mean, variance), noise)
        streams = cohort.streams("predict")
        draws = laplace.sample_outputs(mean, covariance, self.predict_draws, streams)
        found = _predictive(problem, draws, noise)
        if not probit:
            return found
        closed = problem.likelihood.predictive(laplace.probit(mean, variance)[:, None])
        return attrs.evolve(found, closed_form=closed.draws[:, 0])

    def posterior(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> Gaussian:
        """Return each client's mean and its subnetwork's marginal variances, 0 elsewhere.

        A client without a subnetwork has the server's variances. Correlations are left out.
        """
        whole = _gaussian(join_personal(problem, broadcast.start, cohort))
        memory = SubnetworkMemory.unpack(cohort.memory, Gaussian)
        servers = _gaussian(broadcast.start).variance
        found = [memory.subnetwork(k) for k in range(len(whole.mean))]
        shared = torch.stack([servers if one is None else one.variance for one in found])
        certain = shared.new_zeros(len(shared), problem.layout.personal_total)
        return Gaussian(whole.mean, problem.layout.join(shared, certain))


def substitute_alpha(prior: Posterior, alpha: float) -> Tensor:
    """Return g ``[R]``: the prior's variances, with alpha in place of 0."""
    variance = _gaussian(prior).variance
    return variance.masked_fill(variance == 0, alpha)


def likelihood_noise(problem: Problem, clients: int) -> Tensor:
    """Return the noise variance of the likelihood ``[K]`` (1, unused, for classification)."""
    likelihood = problem.likelihood
    known = likelihood.noise_variance if isinstance(likelihood, GaussianNoise) else 1.0
    return problem.initial.new_full((clients,), known)


def residual_variance(problem: Problem, weights: Tensor, cohort: Cohort) -> Tensor:
    """Return each client's mean squared residual on its training targets ``[K]``."""
    with torch.no_grad():
        residual = (problem.forward(weights, cohort.x) - cohort.y).square().mean(2)
    found = torch.stack([row[:n].mean() for row, n in zip(residual, cohort.sizes, strict=True)])
    return found.clamp_min(torch.finfo(found.dtype).eps)


def available_memory(device: torch.device) -> int:
    """Return the total memory in bytes: of the GPU if `device` is one, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _predictive(problem: Problem, outputs: Tensor, noise: Tensor) -> Predictive:
    if isinstance(problem.likelihood, GaussianNoise):
        return Predictive(outputs, noise[:, None, None])
    return problem.likelihood.predictive(outputs)


def _gaussian(posterior: Posterior) -> Gaussian:
    assert isinstance(posterior, Gaussian), "the registry admits no other family"  # noqa: S101
    return posterior
