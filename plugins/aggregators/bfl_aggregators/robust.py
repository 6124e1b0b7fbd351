"""Order statistics over clients, coordinate by coordinate."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bflcore import Posterior
from bflcore.aggregation import COORDINATES, blocks

__all__ = ["trimmed_mean"]


def trimmed_mean(posteriors: Posterior, cut: int) -> Posterior:
    """Average ``[K, P]`` over clients but for the `cut` smallest and the `cut` largest values.

    Each field of the posterior is trimmed by itself.
    """
    return posteriors.map(lambda tensor: _trimmed(tensor, cut))


def _trimmed(values: Tensor, cut: int) -> Tensor:
    fused = values.new_empty(values.shape[1:])
    for part in blocks(len(fused), COORDINATES):
        # NumPy sorts short rows ten times as fast as torch does.
        rows = np.sort(values[:, part].T.contiguous().cpu().numpy(), axis=1)
        middle = rows[:, cut : len(values) - cut].mean(axis=1, dtype=np.float64)
        fused[part] = torch.from_numpy(middle)
    return fused
