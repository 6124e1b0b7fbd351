"""FedPop: a shared body, and a head per client that is sampled by Langevin dynamics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import attrs

from bfl_baselines.divided import Divided
from bflcore import GradientInference, LocalResult, Posterior, component, option
from bflcore.inference.gradient import Batch, batches, loss_per_client, mean_loss, steps
from bflcore.inference.memory import Memory, join_personal
from bflcore.inference.normals import Noise
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, Layout, Predictive, Problem
else:
    torch = lazy("torch")

__all__ = ["Langevin", "Particles"]

# Keys in statistics and in the server's state, of the heads' prior N(m, sigma^2):
CENTRE = "centre"  # m ``[P_personal]``
SPREAD = "spread"  # mean square of the heads - prior_sigma^2 ``[]``

SMALLEST_VARIANCE = 1e-8  # of that prior; sigma^2 is a difference, which rounding may make negative


@attrs.frozen(eq=False)
class Particles(Posterior):
    """A discrete distribution: equally likely draws of the parameters.

    `draws` ``[..., S, P]``. Joining one draw of the body with S of the head gives S draws.
    """

    name = "particles"
    reference = "Kotelevskii et al. 2022 (FedPop), section 3"

    draws: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean of the draws ``[..., P]``."""
        return self.draws.mean(-2)

    @classmethod
    def arbitrary(cls, layout: Layout, clients: int, noise: torch.Generator) -> Particles:
        """Return two standard normal draws per client."""
        return cls(torch.randn(clients, 2, layout.total, generator=noise, dtype=torch.float64))

    def sample(self, noise: Tensor) -> Tensor:
        """Select a draw by the quantile of the first number of `noise` ``[..., P]``."""
        count = self.draws.shape[-2]
        chosen = (torch.special.ndtr(noise[..., :1]) * count).long().clamp_max(count - 1)
        return torch.take_along_dim(self.draws, chosen[..., None], dim=-2).squeeze(-2)

    def kl(self, other: Particles) -> Tensor:
        """Return 0 where the draws coincide and infinity elsewhere ``[...]``."""
        apart = ~(self.draws == other.draws).all(-1).all(-1)
        return apart.to(self.draws.dtype).masked_fill(apart, float("inf"))


@attrs.frozen(eq=False, kw_only=True)
class Chain(Memory):
    """The memory of a client: the last S states of its chain, the latest at the end."""

    personal: Particles  # ``[S, P_personal]``


@component
class Langevin(GradientInference):
    """Sample the personal parameters by Langevin dynamics; train the shared ones given these.

    The personal parameters of all clients have the prior N(m, sigma^2). ``--hyper accumulate``
    learns m and sigma; otherwise they are 0 and `prior_sigma`. Every step is taken on all samples
    of a client.
    """

    name = "langevin"
    reference = "Kotelevskii et al. 2022 (FedPop), Algorithm 1 and eq. 5"
    family = "particles"

    batch_size: int = option(
        500, "samples per forward pass, which bounds memory; all samples make a step", at_least=1
    )
    inner_steps: int = option(10, "Langevin steps per local epoch (M)", at_least=1)
    burn_in: float = option(
        0.5, "fraction of these steps whose states are dropped", at_least=0, below=1
    )
    langevin_lr: float = option(
        0.0125, "step size of the Langevin dynamics (h), for the loss per sample", above=0
    )
    prior_sigma: float = option(
        0.1, "initial standard deviation of the prior of personal parameters", above=0
    )
    particles: int = option(
        50, "states of the chain kept for prediction (the last ones after burn-in)", at_least=1
    )

    def initial(self, problem: Problem) -> Particles:
        """Return the network's random initialisation as one particle ``[1, P]``."""
        return Particles(problem.initial[None])

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return a chain whose states are all the initialisation."""
        head = self.initial(problem).split(problem.layout)[1]
        return Chain(personal=head.map(lambda draw: draw.repeat(self.particles, 1))).pack()

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Alternate in each local epoch between Langevin steps of the head and steps of the body.

        With U(z) = -log p(D | body, z) - log N(z; m, sigma^2), the head z is updated by
        z <- z - h/n grad U + sqrt(2 h/n) xi, where h is `langevin_lr` and n the number of samples
        of the client. The states after `burn_in` are the epoch's draws. The body then takes as many
        steps as there are draws, each along the gradient averaged over the draws.
        """
        k = sum(size > 0 for size in cohort.sizes)  # the other clients do not change
        body = broadcast.start.mean.repeat(len(cohort.clients), 1)  # [K, P_shared]
        chain = Chain.unpack(cohort.memory, Particles).personal.draws  # [K, S, P_personal]
        m, variance = self._prior(broadcast, chain)
        n, h = chain.new_tensor(cohort.sizes[:k])[:, None], self.langevin_lr
        nll, noise = LossOnAll(self, problem, cohort), Noise(cohort.streams("langevin"))
        burn_in = int(self.burn_in * self.inner_steps)
        draws = self.inner_steps - burn_in
        plan = self.replace(  # of the body's steps
            local_epochs=self.local_epochs * draws, batch_size=max(1, *cohort.sizes)
        )
        optimiser = plan.update_rule(body, cohort)
        total = body.new_zeros(len(body))
        for _ in range(self.local_epochs):
            z, states = chain[:k, -1], []
            features = nll.features(body[:k])
            for _ in range(self.inner_steps):
                drift = nll.of_head(body[:k], z, features) + (z - m) / (variance * n)  # grad U / n
                xi = noise.fill(torch.empty_like(z))
                z = z + ((2 * h / n).sqrt() * xi - h * drift)
                states.append(z)
            for _ in range(draws):
                loss, gradient = nll.of_body(body[:k], states[burn_in:])
                optimiser.step(gradient)
                total[:k] += loss
            moved = torch.cat([chain[:k], torch.stack(states[burn_in:], dim=1)], dim=1)
            chain = torch.cat([moved[:, -self.particles :], chain[k:]])
        return LocalResult(  # the body is one particle, the head S: joined only to predict
            cohort.clients,
            Particles(body[:, None]),
            torch.tensor(cohort.sizes),
            mean_loss(total, steps(plan, cohort)),
            self._statistics(problem, broadcast, chain),
            {**cohort.memory, **Chain(personal=Particles(chain)).pack()},
        )

    def _prior(self, broadcast: Broadcast, chain: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean ``[P_personal]`` and variance ``[]`` of the prior of the heads."""
        m = broadcast.hyper.get(CENTRE, torch.zeros_like(chain[0, 0]))
        variance = chain.new_tensor(self.prior_sigma**2)
        if SPREAD in broadcast.hyper and len(m):  # E z^2 - (E z)^2, averaged over parameters
            variance = variance + broadcast.hyper[SPREAD] - m.square().mean()
        return m, variance.clamp_min(SMALLEST_VARIANCE)

    def _statistics(
        self, problem: Problem, broadcast: Broadcast, chain: Tensor
    ) -> dict[str, Tensor]:
        """Return each client's share of the M-step, which maximises the expected log prior.

        The maximum is m = mean of z and sigma^2 = mean of (z - m)^2 over the particles of all
        clients. Clients send (their moment - the server's) / N; added to the server's, these give
        the moments over all clients.
        """
        m = broadcast.hyper.get(CENTRE, torch.zeros_like(chain[0, 0]))
        spread = broadcast.hyper.get(SPREAD, chain.new_zeros(()))
        square = chain.square().sum((1, 2)) / max(1, chain[0].numel()) - self.prior_sigma**2
        clients = len(problem.clients)
        return {CENTRE: (chain.mean(1) - m) / clients, SPREAD: (square - spread) / clients}

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Run the chain of novel clients as in a round."""
        return self.fit(problem, broadcast, cohort).memory if cohort.novel else cohort.memory

    def predict(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Predictive:
        """Average over the particles."""
        whole = join_personal(problem, broadcast.start, cohort)
        assert isinstance(whole, Particles), "the registry admits no other family"  # noqa: S101
        return problem.likelihood.predictive(problem.outputs(whole.draws, x))


class LossOnAll:
    """The mean loss of k clients, each on all of its samples, and its gradients.

    Clients without samples are not among the k. Bodies are w ``[k, P_shared]``, heads are z
    ``[k, P_personal]``.
    """

    def __init__(self, inference: Langevin, problem: Problem, cohort: Cohort) -> None:
        self._problem, self._network = problem, Divided(problem, cohort.x[0, :1])
        self._batches = list(batches(inference.replace(local_epochs=1), cohort))
        n = cohort.x.new_tensor(cohort.sizes)
        self._shares = [n.new_tensor(b.sizes) / n[: len(b.sizes)] for b in self._batches]

    def features(self, w: Tensor) -> list[Tensor]:
        """Return the features of all samples by batch ``[k, B, ...]``."""
        with torch.no_grad():
            return [self._network.features(w[: len(b.sizes)], b.x) for b in self._batches]

    def of_head(self, w: Tensor, z: Tensor, features: list[Tensor]) -> Tensor:
        """Return the gradient for the heads ``[k, P_personal]``, given the bodies' `features`."""

        def loss(z: Tensor, number: int) -> Tensor:
            return self._loss(w, z, features[number], self._batches[number])

        return self._differentiate(loss, z)[1]

    def of_body(self, w: Tensor, draws: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean over heads `draws` of the losses ``[k]`` and gradients ``[k, P_shared]``.

        All draws share one pass through the body.
        """

        def loss(w: Tensor, number: int) -> Tensor:
            batch = self._batches[number]
            features = self._network.features(w, batch.x)
            return torch.stack([self._loss(w, z, features, batch) for z in draws]).mean(0)

        return self._differentiate(loss, w)

    def _loss(self, w: Tensor, z: Tensor, features: Tensor, batch: Batch) -> Tensor:
        k = len(batch.sizes)
        return loss_per_client(self._problem, self._network.outputs(w[:k], z[:k], features), batch)

    def _differentiate(
        self, loss: Callable[[Tensor, int], Tensor], at: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `loss` and its gradient at ``[k, ...]``, each summed over the numbered batches."""
        total, gradient = at.new_zeros(len(at)), torch.zeros_like(at)
        for number, share in enumerate(self._shares):
            k = len(share)
            leaf = at[:k].detach().requires_grad_()
            mean = share * loss(leaf, number)
            total[:k] += mean.detach()
            if at.shape[1]:
                gradient[:k] += torch.autograd.grad(mean.sum(), leaf)[0]
        return total, gradient
