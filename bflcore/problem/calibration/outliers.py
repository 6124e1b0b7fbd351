"""A threshold for out-of-distribution scores: how strange a sample must be to be flagged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bflcore.lazy import lazy
from bflcore.options import component, option
from bflcore.problem.calibration.base import Calibrator
from bflcore.problem.calibration.sketch import bins_of, histogram, thresholds

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.problem import ood
    from bflcore.problem.likelihoods import Predictive
else:
    torch = lazy("torch")
    ood = lazy("bflcore.problem.ood")

__all__ = ["Outliers"]


@component
class Outliers(Calibrator):
    """Flag samples whose out-of-distribution score exceeds that of most calibration samples.

    A new sample that is exchangeable with the calibration samples is flagged with probability at
    most ``1 - share``. What share of strange samples is flagged depends on the model.
    """

    name = "ood"
    reference = "Laxhammar & Falkman 2010; Bates et al. 2023, section 2"

    share: float = option(0.95, "share of usual samples that are not flagged", above=0, below=1)

    def sums(self, predictive: Predictive, y: Tensor) -> dict[str, Tensor]:
        """Return the histogram ``[1, BINS]`` of scores."""
        scores = ood.ood_scores(predictive)[0]
        return {"scores": histogram(scores, torch.zeros_like(scores, dtype=torch.int64), 1)}

    def unlike(self, sums: Mapping[str, Tensor], predictive: Predictive) -> Tensor:
        """Return which samples ``[B]`` have a higher score than the threshold."""
        return bins_of(ood.ood_scores(predictive)[0]) > thresholds(sums["scores"], self.share)
