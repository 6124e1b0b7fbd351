"""Likelihoods: the loss of a network's outputs, and the predictions made from them."""

from __future__ import annotations

import abc
import math
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from bflcore.lazy import lazy
from bflcore.options import Component, component, option
from bflcore.problem.label_prior import log_label_prior

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

__all__ = ["Categorical", "GaussianNoise", "Likelihood", "Predictive", "default_likelihood"]


@attrs.frozen(eq=False)
class Predictive:
    """The prediction for a cohort's samples: `draws`, and for a regression the noise.

    `draws` ``[K, S, B, C]`` are class probabilities, or means of the targets, one per draw S of the
    parameters. `noise` is the variance of the targets (regression), in squared target units:
    one number, or one per client ``[K, ...]`` that broadcasts to ``[K, B, C]``. `closed_form`
    ``[K, B, C]`` are class probabilities in closed form: they are the prediction if given, and the
    draws only say how uncertain the parameters leave it.
    """

    draws: Tensor
    noise: Tensor | None = None
    closed_form: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        """The prediction ``[K, B, C]``: the closed form if there is one, else the draws' mean."""
        return self.draws.mean(1) if self.closed_form is None else self.closed_form


class Likelihood(Component, abc.ABC):
    """Base of likelihoods; ``--likelihood NAME`` selects one. Each is for one task."""

    kind: ClassVar[str] = "likelihood"
    task: ClassVar[Literal["classification", "regression"]]
    # Whether real targets may be scaled to mean 0 and variance 1; counts may not.
    scales_targets: ClassVar[bool] = True
    least: ClassVar[float] = -math.inf  # smallest target of a regression
    ratio: ClassVar[str] = ""  # what the exponential of a linear predictor's coefficient is called

    def outputs(self, needed: int) -> int:
        """Return how many outputs the network needs for so many classes or targets.

        Raises `OptionError` for a number that the likelihood cannot explain.
        """
        return needed

    def check_targets(self, y: Tensor) -> None:
        """Raise `OptionError` for targets ``[N]`` or ``[N, T]`` that cannot be (default: none).

        Called before the run with the targets of all clients.
        """

    @property
    def counts_labels(self) -> bool:
        """Whether `offset` is to be called, with what the clients' labels are (default: no)."""
        return False

    def offset(self, counts: Tensor, pooled: Tensor, *, predicting: bool) -> Tensor | None:
        """Return what is added to a client's outputs ``[C]``; None for nothing (the default).

        `counts` ``[C]`` are how many training samples of each label the client has, `pooled`
        ``[C]`` how many all clients that train have. `predicting` is false in training.
        """
        return None

    @abc.abstractmethod
    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return -log p(target | output) ``[N]`` of outputs ``[N, C]``."""

    @abc.abstractmethod
    def predictive(self, outputs: Tensor) -> Predictive:
        """Turn outputs ``[K, S, B, C]`` into a `Predictive`."""

    def log_density(self, predictive: Predictive, y: Tensor) -> Tensor | None:
        """Return the log densities ``[B, T]`` of real targets `y` under one client's prediction.

        `predictive` has K = 1. The metric NLL is their mean. None, the default: those of the
        Gaussian with the prediction's mean and variance.
        """
        return None


@component
class Categorical(Likelihood):
    """Model class labels: softmax of the outputs, plus the log of the client's label frequencies.

    With `label_prior`, clients share p(x | y) and differ in p(y): in training and prediction, each
    client's logits get log p_k(y) (see `bflcore.problem.label_prior`). This assumes that the labels
    of the samples to predict are as frequent as those that the client trained on; where they are
    not, predict with another `predict_label_prior`.
    """

    name = "categorical"
    task = "classification"
    reference = "label prior: Menon et al. 2021, eq. 10"

    label_prior: float | None = option(
        None,
        "weight of all clients' label frequencies in each client's own, in samples (none = logits "
        "without a label prior)",
        above=0,
    )
    predict_label_prior: str = option(
        "client",
        "label frequencies assumed in predictions: the client's, those of all clients (`pooled`), "
        "or `uniform`",
        choices=("client", "pooled", "uniform"),
    )

    @property
    def counts_labels(self) -> bool:
        """Whether there is a label prior."""
        return self.label_prior is not None

    def offset(self, counts: Tensor, pooled: Tensor, *, predicting: bool) -> Tensor | None:
        """Return log p_k(y) ``[C]``; None without a label prior, or if it is uniform."""
        assumed = self.predict_label_prior if predicting else "client"
        if self.label_prior is None or assumed == "uniform":
            return None
        own = torch.zeros_like(counts) if assumed == "pooled" else counts
        return log_label_prior(own, pooled, self.label_prior)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropies ``[N]`` of logits ``[N, C]``."""
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return softmax probabilities ``[K, S, B, C]``."""
        # A softmax over the last axis does not vectorise over a handful of classes.
        return Predictive(outputs.mT.contiguous().softmax(-2).mT)


@component
class GaussianNoise(Likelihood):
    """Model real targets: the outputs plus Gaussian noise of a known variance."""

    name = "gaussian"
    task = "regression"

    noise_variance: float = option(0.1, "variance of the noise (in squared target units)", above=0)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the negative log densities ``[N]`` of means ``[N, C]``, summed over targets."""
        squares = (outputs - targets).square() / self.noise_variance
        return 0.5 * (squares + math.log(2 * math.pi * self.noise_variance)).sum(-1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the outputs ``[K, S, B, C]`` as means, and the noise variance."""
        return Predictive(outputs, outputs.new_tensor(self.noise_variance))


def default_likelihood(task: Literal["classification", "regression"]) -> Likelihood:
    """Return the default likelihood of a task."""
    return Categorical() if task == "classification" else GaussianNoise()
