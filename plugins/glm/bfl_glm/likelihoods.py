"""Likelihoods of generalised linear models, for any network: truth values, counts, heavy tails."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bflcore import Likelihood, Predictive, component, option
from bflcore.errors import OptionError
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = ["Bernoulli", "Poisson", "StudentT"]


@component
class Bernoulli(Likelihood):
    """Model two classes by one output: the log-odds of the second class (logit link)."""

    name = "bernoulli"
    task = "classification"
    reference = "McCullagh and Nelder 1989, section 4.3"
    ratio = "odds ratio"

    def outputs(self, needed: int) -> int:
        """Return 1. Raises `OptionError` unless there are two classes."""
        if needed != 2:
            raise OptionError(
                f"--likelihood: bernoulli is for 2 classes, but the targets have {needed}; "
                "allowed: categorical"
            )
        return 1

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return log(1 + exp(-z)) or log(1 + exp(z)) ``[N]`` of log-odds z ``[N, 1]``."""
        z, second = outputs[:, 0], targets.to(outputs.dtype)
        return torch.nn.functional.binary_cross_entropy_with_logits(z, second, reduction="none")

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the probabilities ``[K, S, B, 2]`` of both classes."""
        return Predictive(torch.cat([(-outputs).sigmoid(), outputs.sigmoid()], dim=-1))


@component
class Poisson(Likelihood):
    """Model counts: the outputs are the logarithms of their rates."""

    name = "poisson"
    task = "regression"
    reference = "McCullagh and Nelder 1989, section 6.2"
    scales_targets = False
    least = 0.0
    ratio = "rate ratio"

    def check_targets(self, y: Tensor) -> None:
        """Raise `OptionError` for a target that is negative or has a fraction."""
        wrong = (y < 0) | (y != y.floor())
        if bool(wrong.any()):
            value = float(y[wrong][0])
            raise OptionError(
                f"--likelihood: poisson is for counts, but a target is {value:g}; allowed: 0, 1, "
                "2, ...; --likelihood gaussian takes any number"
            )

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return rate - y log rate + log y! ``[N]`` of log rates ``[N, T]``, summed over T."""
        return -_poisson(outputs, targets).sum(-1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the rates ``[K, S, B, T]``; the noise is their mean ``[K, B, T]``."""
        rates = outputs.exp()
        return Predictive(rates, rates.mean(1))

    def log_density(self, predictive: Predictive, y: Tensor) -> Tensor:
        """Return the log probabilities ``[B, T]`` of counts: the mixture over the draws."""
        rates = predictive.draws[0].clamp_min(torch.finfo(predictive.draws.dtype).tiny)
        return _mixture(_poisson(rates.log(), y))


@component
class StudentT(Likelihood):
    """Model real targets with outliers: the outputs plus Student-t noise."""

    name = "student-t"
    task = "regression"
    reference = "Lange, Little and Taylor 1989"

    degrees: float = option(4.0, "degrees of freedom (fewer: heavier tails)", above=2)
    scale: float = option(0.3, "scale of the noise (in target units)", above=0)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the negative log densities ``[N]`` of locations ``[N, T]``, summed over T."""
        return -self._log_density(outputs, targets).sum(-1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the outputs ``[K, S, B, T]`` as means, and the variance of the noise."""
        variance = self.scale**2 * self.degrees / (self.degrees - 2)
        return Predictive(outputs, outputs.new_tensor(variance))

    def log_density(self, predictive: Predictive, y: Tensor) -> Tensor:
        """Return the log densities ``[B, T]`` of targets: the mixture over the draws."""
        return _mixture(self._log_density(predictive.draws[0], y))

    def _log_density(self, location: Tensor, y: Tensor) -> Tensor:
        nu = self.degrees
        constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2)
        constant -= math.log(nu * math.pi) / 2 + math.log(self.scale)
        squares = ((y - location) / self.scale).square()
        return constant - (nu + 1) / 2 * (squares / nu).log1p()


def _poisson(log_rates: Tensor, y: Tensor) -> Tensor:
    return y * log_rates - log_rates.exp() - (y + 1).lgamma()


def _mixture(log_densities: Tensor) -> Tensor:
    """Return the log ``[...]`` of the mean density over the draws ``[S, ...]``."""
    return log_densities.logsumexp(0) - math.log(len(log_densities))
