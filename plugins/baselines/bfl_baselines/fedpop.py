"""FedPop: a shared body, and a head per client that is sampled by Langevin dynamics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from bflcore import GradientInference, LocalResult, Posterior, component, option
from bflcore.inference.gradient import Gradient, batches, mean_loss, steps
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

CENTRE = "centre"  # key of the prior mean of the heads, in statistics and in the server's state


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

    The personal parameters of all clients have the prior N(m, prior_sigma^2). ``--hyper
    accumulate`` learns m; otherwise m is 0.
    """

    name = "langevin"
    reference = "Kotelevskii et al. 2022 (FedPop), Algorithm 1 and eq. 5"
    family = "particles"

    inner_steps: int = option(10, "Langevin steps per minibatch", at_least=1)
    burn_in: float = option(
        0.5,
        "fraction of these steps left out of the gradient of the shared parameters",
        at_least=0,
        below=1,
    )
    langevin_lr: float = option(
        0.05, "step size of the Langevin dynamics (h), for the loss per sample", above=0
    )
    prior_sigma: float = option(
        0.1, "standard deviation of the prior of personal parameters", above=0
    )
    particles: int = option(
        50, "states of the chain kept for prediction (one per minibatch, the last ones)", at_least=1
    )

    def initial(self, problem: Problem) -> Particles:
        """Return the network's random initialisation as one particle ``[1, P]``."""
        return Particles(problem.initial[None])

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return a chain whose states are all the initialisation."""
        head = self.initial(problem).split(problem.layout)[1]
        return Chain(personal=head.map(lambda draw: draw.repeat(self.particles, 1))).pack()

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Run a chain per client over its minibatches; the body takes a step after each.

        With U(z) = -log p(D | body, z) - log N(z; m, sigma^2), estimated on the minibatch, the
        head z is updated by z <- z - h/n grad U + sqrt(2 h/n) xi, where h is `langevin_lr` and n
        the number of samples of the client. The gradient of the body is averaged over z after
        `burn_in`. Clients send (mean of their particles - m) / N; added to m, these give the mean
        over all clients' particles (the M-step).
        """
        layout, h = problem.layout, self.langevin_lr
        body = broadcast.start.mean.repeat(len(cohort.clients), 1)  # [K, P_shared]
        chain = Chain.unpack(cohort.memory, Particles).personal.draws.clone()  # [K, S, P_personal]
        m = broadcast.hyper.get(CENTRE, torch.zeros_like(chain[0, 0]))
        n = chain.new_tensor(cohort.sizes).clamp_min(1)[:, None]
        burn_in = int(self.burn_in * self.inner_steps)
        averaged = self.inner_steps - burn_in
        differentiate, noise = Gradient(problem), Noise(cohort.streams("langevin"))
        rule = self.update_rule(body, cohort)
        total = body.new_zeros(len(body))
        for batch in batches(self, cohort):
            k = len(batch.sizes)
            z, loss, expected = chain[:k, -1], body.new_zeros(k), torch.zeros_like(body[:k])
            for step in range(self.inner_steps):
                nll, gradient = differentiate(layout.join(body[:k], z), batch)
                of_body, of_head = layout.split(gradient)
                if step >= burn_in:
                    loss += nll / averaged
                    expected = expected.add(of_body, alpha=1 / averaged)
                drift = of_head + (z - m) / (self.prior_sigma**2 * n[:k])  # grad U / n
                xi = noise.fill(torch.empty_like(z))
                z = z + ((2 * h / n[:k]).sqrt() * xi - h * drift)
            chain[:k] = torch.cat([chain[:k, 1:], z[:, None]], dim=1)
            rule.step(expected)
            total[:k] += loss
        return LocalResult(  # the body is one particle, the head S: joined only to predict
            cohort.clients,
            Particles(body[:, None]),
            torch.tensor(cohort.sizes),
            mean_loss(total, steps(self, cohort)),
            {CENTRE: (chain.mean(1) - m) / len(problem.clients)},
            {**cohort.memory, **Chain(personal=Particles(chain)).pack()},
        )

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
