"""The steps of IVON on the Gaussians of a cohort (Shen et al. 2024, Algorithm 1).

It keeps v = sigma^2 instead of the Hessian h: 1/(h + delta) is lambda v. With an estimate g^ of the
gradient at theta = m + u, where u = sigma eps, and h^ = g^ u / sigma^2, line 5 of the algorithm is

    h + delta  <-  (h + delta) (1 + r + r^2/2) = (h + delta) (1 + (1 + r)^2) / 2,
    1 + r = beta2 + (1 - beta2) (h^ + delta) / (h + delta)
          = beta2 + (1 - beta2) lambda (g^ u + delta v).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from bflcore import Gaussian
from bflcore.inference.variational import SMALLEST_SIGMA
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = ["Newton"]


@attrs.frozen(eq=False)
class Rows:
    """What the steps of some clients read and write, each ``[k, P]``."""

    mean: Tensor
    scaled: Tensor  # v, times delta where that is one number
    total: Tensor  # sum_i beta1^(t - i) g^_i
    theta: Tensor  # also working memory: the parameters are needed until the gradient is known
    u: Tensor

    def first(self, k: int) -> Rows:
        """Return views of the first k clients."""
        return Rows(*(getattr(self, field.name)[:k] for field in attrs.fields(Rows)))


class Newton:
    """The Gaussians ``[K, P]`` of a cohort, which steps change in place.

    `samples` are the clients' lambda; `lr` is alpha lambda, the same for all clients. A step costs
    what its passes over memory cost. There are fewer of them where the prior's means are zero, and
    where its variances are equal and all clients have equally many samples (one client has): delta
    is one number then.
    """

    def __init__(
        self,
        start: Gaussian,
        prior: Gaussian,
        samples: Sequence[float],
        *,
        lr: float,
        momentum: float,
        hessian_momentum: float,
    ) -> None:
        per_client = start.mean.new_tensor(samples)[:, None]
        decay = 1 / (prior.variance * per_client)
        one = bool((decay == decay[0, 0]).all())
        self._decay = None if one else decay
        self._scale = float(decay[0, 0]) if one else 1.0  # of `Rows.scaled`
        self._gain = (1 - hessian_momentum) * (samples[0] if one else per_client)
        self._centre = prior.mean if bool(prior.mean.any()) else None
        self._lr, self._beta1 = lr, momentum
        mean, theta, u = start.mean.clone(), *(torch.empty_like(start.mean) for _ in range(2))
        scaled = start.variance.clamp(SMALLEST_SIGMA**2).mul_(self._scale)
        self._all = Rows(mean, scaled, torch.zeros_like(mean), theta, u)
        self._rows = self._all
        # Numbers that are added in the same pass as a product.
        self._zero, self._half, self._rest = (
            mean.new_tensor(number) for number in (0.0, 0.5, hessian_momentum)
        )
        self._taken = 0
        self._estimates: tuple[Tensor, Tensor | None] | None = None  # g^, and g^ u of several draws

    @property
    def posterior(self) -> Gaussian:
        """The Gaussians ``[K, P]``."""
        return Gaussian(self._all.mean.clone(), self._all.scaled / self._scale)

    def draw(self, noise: Sequence[tuple[Tensor, int]]) -> Tensor:
        """Return parameters theta ``[k, P]`` of the first k clients; the next call overwrites them.

        `noise` holds the normals ``[P]`` of each of these clients, and their sign.
        """
        if len(noise) != len(self._rows.mean):
            self._rows = self._all.first(len(noise))
        rows, unit = self._rows, self._scale**-0.5
        torch.sqrt(rows.scaled, out=rows.theta)
        for row, (eps, sign) in enumerate(noise):
            torch.addcmul(self._zero, eps, rows.theta[row], value=sign * unit, out=rows.u[row])
        return torch.add(rows.mean, rows.u, out=rows.theta)

    def observe(self, gradient: Tensor, draws: int = 1) -> None:
        """Note the gradient ``[k, P]`` at the parameters drawn last: g^, or one of `draws`.

        It is read by `step`, and must not change before.
        """
        if draws == 1:
            self._estimates = gradient, None
            return
        gradient = gradient / draws
        product = gradient * self._rows.u
        mean, products = self._estimates or (None, None)
        if mean is not None and products is not None:
            gradient, product = gradient + mean, product + products
        self._estimates = gradient, product

    def step(self) -> None:
        """Take a step for the clients of the last draw."""
        assert self._estimates is not None, "observe a gradient first"  # noqa: S101
        (gradient, product), self._estimates = self._estimates, None
        rows, k = self._rows, len(gradient)
        work = self._add_hessian(gradient, product)  # g^ u + delta v
        if isinstance(self._gain, float):
            torch.add(self._rest, work, alpha=self._gain, out=work)  # 1 + r
        else:
            work.mul_(self._gain[:k]).add_(self._rest)
        rows.scaled.div_(torch.addcmul(self._half, work, work, value=0.5, out=work))
        torch.add(gradient, rows.total, alpha=self._beta1, out=rows.total)
        self._taken += 1
        debias = (1 - self._beta1) / (1 - self._beta1**self._taken)  # g/(1 - beta1^t) / total
        pull = rows.mean
        if self._centre is not None:
            pull = torch.sub(rows.mean, self._centre[:k], out=work)
        if self._decay is None:
            torch.add(rows.total, pull, alpha=self._scale / debias, out=work)
        else:
            torch.addcmul(rows.total, pull, self._decay[:k], value=1 / debias, out=work)
        rows.mean.addcmul_(work, rows.scaled, value=-self._lr * debias / self._scale)

    def _add_hessian(self, gradient: Tensor, product: Tensor | None) -> Tensor:
        """Return g^ u + delta v ``[k, P]`` in working memory."""
        rows = self._rows
        if self._decay is None and product is None:
            return torch.addcmul(rows.scaled, gradient, rows.u, out=rows.theta)
        if product is None:
            product = torch.mul(gradient, rows.u, out=rows.u)
        if self._decay is None:
            return torch.add(product, rows.scaled, out=rows.theta)
        decay = self._decay[: len(gradient)]
        return torch.addcmul(product, rows.scaled, decay, out=rows.theta)

    def restore(self, start: Gaussian, fixed: Tensor) -> None:
        """Put the `fixed` parameters ``[P]`` back to `start` ``[K, P]``."""
        self._all.mean.copy_(torch.where(fixed, start.mean, self._all.mean))
        before = start.variance * self._scale
        self._all.scaled.copy_(torch.where(fixed, before, self._all.scaled))
