"""The nonlinear channels: moments of a Gaussian variable given a ReLU or an observation.

Notation of Xu et al. 2024, appendix A: z ~ N(p, V) before, S = (E z - p) / V its residual and
U = (1 - Var z / V) / V its precision after. All functions are elementwise, in float32 or float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Normal",
    "Output",
    "Rectified",
    "Residual",
    "gaussian_output",
    "label_log_probabilities",
    "normal",
    "probit_output",
    "probit_probabilities",
    "relu_backward",
    "relu_forward",
]

LOG_ROOT_2PI = 0.5 * math.log(2 * math.pi)
# Below -TAIL, quotients are computed from series, since they would cancel in the dtype.
TAIL = {torch.float32: 8.0, torch.float64: 30.0}
NODES = 32  # nodes of the Gauss-Hermite quadrature for class probabilities


class Normal(NamedTuple):
    """P(t < alpha) for a standard normal t, its logarithm, and the truncated moments.

    `ratio` phi / Phi, `excess` E[alpha + t | t > -alpha], `variance` Var[t | t > -alpha].
    """

    cdf: Tensor
    log_cdf: Tensor
    ratio: Tensor
    excess: Tensor
    variance: Tensor


class Residual(NamedTuple):
    """Residual S and precision U of a variable given its channel, ``[K, B, M]``."""

    s: Tensor
    u: Tensor


class Output(NamedTuple):
    """The message of observations: S and U ``[K, B, C]``, and statistics per sample ``[K, B]``.

    `nll` in nats; the noise is estimated from `residuals`. Regression: `residual`, the expected
    square of y - z. Classification: `margin` and `margin_square`, the mean and mean square of
    z_c - z_y over the classes c other than y.
    """

    s: Tensor
    u: Tensor
    nll: Tensor
    residuals: dict[str, Tensor]


def normal(alpha: Tensor, logs: bool = True) -> Normal:
    """Return functions of the standard normal at `alpha`, accurate in the tails.

    Without `logs` the logarithm is not computed (`log_cdf` is `cdf`).
    """
    body = alpha.clamp(-TAIL[alpha.dtype], 1e4)
    return _truncated(alpha, body, _density(body), _cdf(body), logs)


def log_cdf(alpha: Tensor) -> Tensor:
    """Return log P(t < alpha), the `log_cdf` of `normal` alone."""
    cut = TAIL[alpha.dtype]
    found = _cdf(alpha.clamp_min(-cut)).log_()
    tail = (alpha < -cut).nonzero(as_tuple=True)
    if len(tail[0]):
        found[tail] = _log_tail(-alpha[tail])[0]
    return found


def _cdf(alpha: Tensor) -> Tensor:
    twice: Tensor = torch.special.erfc(alpha * -math.sqrt(0.5))
    return twice.mul_(0.5)


def _density(alpha: Tensor) -> Tensor:
    return alpha.square().mul_(-0.5).sub_(LOG_ROOT_2PI).exp_()


def _log_tail(t: Tensor) -> tuple[Tensor, Tensor]:
    """Return log P(s < -t) and E[s - t | s > t] for a large t, by the series of Mills' ratio.

    Abramowitz & Stegun 1964, 26.2.12.
    """
    s = t.square().reciprocal()
    excess = (1 - s * (2 - s * (10 - s * (74 - 706 * s)))) / t
    return -0.5 * t.square() - LOG_ROOT_2PI - (t + excess).log(), excess


def _truncated(alpha: Tensor, body: Tensor, density: Tensor, cdf: Tensor, logs: bool) -> Normal:
    """Complete `normal` from density and CDF at `body`, which is alpha without its tail.

    The few entries in the tail are computed apart, which is faster than both ways for all.
    """
    ratio = density / cdf
    excess = body + ratio
    found = Normal(cdf, cdf.log() if logs else cdf, ratio, excess, 1 - ratio * excess)
    tail = (alpha < -TAIL[alpha.dtype]).nonzero(as_tuple=True)
    if len(tail[0]):
        t = -alpha[tail]
        s = t.square().reciprocal()
        log_tail, over = _log_tail(t)
        if logs:
            found.log_cdf[tail] = log_tail
        found.cdf[tail] = log_tail.exp()
        found.ratio[tail] = t + over
        found.excess[tail] = over
        found.variance[tail] = s * (1 - s * (6 - s * (50 - 518 * s)))
    return found


class Rectified(NamedTuple):
    """Moments of max(0, z) for z ~ N(p, V), and intermediate values for the backward pass.

    `p`, `before` (V) and its root `deviation` are those of z; `below` is `normal` of
    -p / deviation, the branch z < 0; `mean` and `variance` are those of max(0, z).
    """

    p: Tensor
    before: Tensor
    deviation: Tensor
    below: Normal
    mean: Tensor
    variance: Tensor


def relu_forward(p: Tensor, variance: Tensor) -> Rectified:
    """Return the moments of max(0, z) (Xu et al. 2024, appendix A-1).

    With alpha = p / sqrt V, Phi and phi its CDF and density, and Q = 1 - Phi: the mean is
    p Phi + sqrt V phi, the variance V (Phi + alpha^2 Phi Q - alpha phi (Phi - Q) - phi^2).
    """
    deviation = variance.sqrt()
    alpha = p / deviation
    density, cdf, rest = _density(alpha), _cdf(alpha), _cdf(-alpha)
    mean = torch.addcmul(p * cdf, deviation, density)
    spread = torch.addcmul(cdf, alpha.square(), cdf * rest)
    spread.addcmul_(alpha * density, cdf - rest, value=-1).addcmul_(density, density, value=-1)
    spread.mul_(variance).clamp_min_(0)
    # Far in the tail, density and CDF vanish; their quotient is replaced.
    floor = math.exp(-0.5 * TAIL[alpha.dtype] ** 2) / TAIL[alpha.dtype] ** 3
    body = (-alpha).clamp_min_(-TAIL[alpha.dtype])
    below = _truncated(-alpha, body, density, rest.clamp_min_(floor), logs=True)
    return Rectified(p, variance, deviation, below, mean, spread)


def relu_backward(z: Rectified, field: Tensor, precision: Tensor) -> Residual:
    """Return S and U of z given the next layer's message to u = max(0, z).

    The message is exp(h u - Lambda u^2 / 2) with h = `field`, Lambda = `precision`. The channel
    is not log-concave: its variance may exceed V, and then U is 0.
    """
    p, variance, below = z.p, z.before, z.below
    d = 1 + variance * precision
    narrow = variance / d  # of the branch z > 0
    shift = (field - p * precision) * narrow  # m - p
    m = p + shift
    width = narrow.sqrt()
    above = normal(m / width)
    # log of the ratio of the evidence for z > 0 to that for z < 0
    gain = 0.5 * (shift * (m + p) / narrow + p.square() * precision) - 0.5 * d.log()
    upper = (above.log_cdf - below.log_cdf + gain).sigmoid()
    lower = 1 - upper
    s = (upper * (shift + width * above.ratio) - lower * z.deviation * below.ratio) / variance
    gap = width * above.excess + z.deviation * below.excess  # E1 - E0
    within = lower * below.variance + upper * above.variance / d
    spread = within + lower * upper * gap.square() / variance
    return Residual(s, ((1 - spread) / variance).clamp_min_(0))


def gaussian_output(p: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> Output:
    """Return the message of targets `y` ``[K, B, T]`` with noise variance `noise` ``[K, 1, 1]``."""
    u = 1 / (variance + noise)
    s = (y - p) * u
    residual = (s * noise).square() + variance * noise * u  # (y - E z)^2 + Var z
    nll = 0.5 * ((y - p) * s - u.log()) + LOG_ROOT_2PI
    return Output(s, u, nll.sum(-1), {"residual": residual.mean(-1)})


def probit_output(p: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> Output:
    """Return the message of labels `y` ``[K, B]`` to logits ``[K, B, C]``.

    The likelihood is prod over c != y of Phi((z_y - z_c) / sqrt(noise)) (eq. 6): messages go from
    each rival class to z_y, then to each rival from z_y without its own message (appendix A-2,
    corrected).
    """
    at = y[..., None]
    own = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, at, True)
    p_y, v_y = p.gather(-1, at), variance.gather(-1, at)
    total = (noise + variance + v_y).masked_fill(own, 1.0)
    d = ((p_y - p) / total.sqrt()).masked_fill(own, 0.0)
    rival = normal(d, logs=False)
    k = rival.ratio * (rival.ratio + d)
    rest = total - v_y * k
    lam = (k / rest).masked_fill(own, 0.0)
    g = (rival.ratio * total.sqrt() / rest).masked_fill(own, 0.0)
    lam_sum, g_sum = lam.sum(-1, keepdim=True), g.sum(-1, keepdim=True)
    shrink = 1 + v_y * lam_sum
    cavity = 1 / (1 / v_y + lam_sum - lam)
    total = noise + variance + cavity
    d = (p_y + (g_sum - g) * cavity - p) / total.sqrt()
    rival = normal(d, logs=False)
    s = torch.where(own, g_sum / shrink, -rival.ratio / total.sqrt())
    u = torch.where(own, lam_sum / shrink, rival.ratio * (rival.ratio + d) / total)
    z, spread = p + variance * s, variance * (1 - variance * u)
    margin = z - z.gather(-1, at)  # z_c - z_y, 0 at y itself
    square = margin.square() + (spread + spread.gather(-1, at)).masked_fill(own, 0.0)
    rivals = p.shape[-1] - 1
    moments = {"margin": margin.sum(-1) / rivals, "margin_square": square.sum(-1) / rivals}
    nll = -label_log_probabilities(p, variance, noise).gather(-1, at)[..., 0]
    return Output(s, u, nll, moments)


def label_log_probabilities(p: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Return log-probabilities of the classes ``[..., C]``, the product over pairs, normalised.

    Class c has the score sum over j != c of log E Phi((z_c - z_j) / sqrt(noise)). The terms of a
    sum are expectations on their own: exact for two classes, otherwise a cheap substitute for
    `probit_probabilities` during training.
    """
    total = noise[..., None] + variance[..., :, None] + variance[..., None, :]
    gaps = (p[..., :, None] - p[..., None, :]) / total.sqrt()  # [..., C, C], 0 where j = c
    return log_cdf(gaps).sum(-1).log_softmax(-1)


def probit_probabilities(p: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Return class probabilities ``[..., C]`` of logits N(p, V) under the probit product.

    E over z_c of prod_j Phi((z_c - p_j) / sqrt(noise + V_j)), by quadrature, then normalised.
    """
    nodes, weights = map(p.new_tensor, np.polynomial.hermite_e.hermegauss(NODES))
    weights = weights / weights.sum()
    deviation = (noise + variance).sqrt()
    found = torch.empty_like(p)
    for c in range(p.shape[-1]):
        z = p[..., c, None] + variance[..., c, None].sqrt() * nodes  # [..., Q]
        gaps = (z[..., None] - p[..., None, :]) / deviation[..., None, :]
        logs = torch.special.log_ndtr(gaps)
        logs[..., c] = 0
        found[..., c] = torch.logsumexp(logs.sum(-1) + weights.log(), -1)
    return found.softmax(-1)
