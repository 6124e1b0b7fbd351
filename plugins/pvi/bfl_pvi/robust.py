"""Robust losses: wrong labels and outliers pull less than under the likelihood.

They replace -log p(y | x, w) in the exponent of the posterior (generalised Bayes); predictions stay
softmax probabilities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore import Categorical, Likelihood, component, option
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Predictive
else:
    torch = lazy("torch")

__all__ = ["GeneralisedCrossEntropy"]


@component
class GeneralisedCrossEntropy(Likelihood):
    """Model class labels, some of which are wrong: the loss of a sample is bounded.

    (1 - p_y^delta) / delta, where p_y is the probability of the label. Its gradient is that of the
    cross entropy times p_y^delta, so that labels the model does not believe hardly count. The limit
    of delta to 0 is the cross entropy; at 1 it is half the absolute error.
    """

    name = "generalised-cross-entropy"
    aliases = ("gce",)
    reference = "Zhang & Sabuncu 2018, eq. 6; Mildner et al. 2025 (FedGVI), section 5"
    task = "classification"

    delta: float = option(
        0.8, "exponent (0 = cross entropy; 1 = most robust)", at_least=0, at_most=1
    )

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses ``[N]`` of logits ``[N, C]``."""
        crosses = Categorical().nll(outputs, targets)
        # 1 - exp(-x), without the digits that a difference of numbers near 1 loses.
        return -torch.expm1(-self.delta * crosses) / self.delta if self.delta else crosses

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return softmax probabilities ``[K, S, B, C]``."""
        return Categorical().predictive(outputs)
