"""Particles, and the chain of FedPop that draws them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from bflcore import LocalResult, Posterior
from bflcore.inference.memory import PERSONAL

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bfl_baselines.inferences import Langevin
    from bflcore import Broadcast, Cohort, Layout, Problem
    from bflcore.inference.gradient import Batch

CENTRE = "centre"  # of the heads' prior: its name in statistics and at the server


@attrs.frozen(eq=False)
class Particles(Posterior):
    """Equally likely draws of the parameters, and nothing between them.

    `draws` ``[..., S, P]``. Joining one draw of the body with S of the head gives S draws.
    """

    name = "particles"
    reference = "Kotelevskii et al. 2022 (FedPop), section 3"

    draws: Tensor

    @property
    def mean(self) -> Tensor:
        """Average of the draws ``[..., P]``."""
        return self.draws.mean(-2)

    @classmethod
    def arbitrary(cls, layout: Layout, clients: int, noise: torch.Generator) -> Particles:
        """Return two standard normal draws a client."""
        import torch

        return cls(torch.randn(clients, 2, layout.total, generator=noise, dtype=torch.float64))

    def sample(self, noise: Tensor) -> Tensor:
        """Choose a draw by the quantile of the first number of `noise` ``[..., P]``."""
        import torch

        count = self.draws.shape[-2]
        chosen = (torch.special.ndtr(noise[..., :1]) * count).long().clamp_max(count - 1)
        return torch.take_along_dim(self.draws, chosen[..., None], dim=-2).squeeze(-2)

    def kl(self, other: Particles) -> Tensor:
        """Return 0 where the draws coincide and infinity elsewhere ``[...]``."""
        apart = ~(self.draws == other.draws).all(-1).all(-1)
        return apart.to(self.draws.dtype).masked_fill(apart, float("inf"))


def langevin(
    inference: Langevin, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> LocalResult:
    """Run a chain per client through its minibatches, the body moving after each.

    With U(z) = -log p(D | body, z) - log N(z; m, sigma^2), estimated from the minibatch, a step is
    z <- z - h/n grad U + sqrt(2 h/n) xi: h is `langevin_lr`, n the client's samples. What clients
    send of their particles' means makes m their average over all clients (the M-step).
    """
    import torch

    from bflcore.inference.gradient import Gradient
    from bflcore.inference.normals import Noise
    from bflcore.inference.point import descend

    layout = problem.layout
    chain = Particles.unpack(cohort.memory, PERSONAL).draws.clone()  # [K, S, P_personal]
    heads = chain[:, -1].clone()
    n = heads.new_tensor(cohort.sizes).clamp_min(1)[:, None]
    centre = broadcast.hyper.get(CENTRE, torch.zeros_like(heads[0]))
    h, noise = inference.langevin_lr, Noise(cohort.streams("langevin"))
    differentiate = Gradient(problem)
    burn_in = int(inference.burn_in * inference.inner_steps)
    averaged = inference.inner_steps - burn_in

    def slope(w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        k = len(w)
        shared = layout.split(w)[0]
        losses, expected = w.new_zeros(k), torch.zeros_like(shared)
        for step in range(inference.inner_steps):
            nll, gradient = differentiate(layout.join(shared, heads[:k]), batch)
            of_body, of_head = layout.split(gradient)
            if step >= burn_in:
                losses += nll / averaged
                expected = expected.add(of_body, alpha=1 / averaged)
            to_prior = (heads[:k] - centre) / (inference.prior_sigma**2 * n[:k])
            xi = noise.fill(torch.empty_like(heads[:k]))
            heads[:k] += (2 * h / n[:k]).sqrt() * xi - h * (of_head + to_prior)
        chain[:k] = torch.cat([chain[:k, 1:], heads[:k, None]], dim=1)
        return losses, layout.join(expected, torch.zeros_like(heads[:k]))

    start = layout.join(broadcast.start.mean.expand(len(heads), -1), heads)
    w, loss = descend(inference, problem, cohort, start, broadcast.round, slope)
    memory = {**cohort.memory, **Particles(chain).pack(PERSONAL)}
    posterior = Particles(layout.split(w)[0][:, None])
    moved = {CENTRE: (chain.mean(1) - centre) / len(problem.clients)}
    return LocalResult(cohort.clients, posterior, torch.tensor(cohort.sizes), loss, moved, memory)
