"""How unlike the training samples a sample looks: the out-of-distribution score."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bflcore.lazy import lazy
from bflcore.problem import metrics, ranking

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.problem.likelihoods import Predictive
else:
    torch = lazy("torch")

__all__ = ["ood_scores", "ood_sums", "ood_unit_scores"]


def ood_scores(predictive: Predictive) -> Tensor:
    """Return the scores of K clients' predictions ``[K, B]``, in float64: the higher, the stranger.

    Classification: the entropy of the prediction in nats, the score of Hendrycks & Gimpel 2017 for
    a predictive distribution instead of its largest probability. Regression: the share of the
    predicted variance that comes from not knowing the parameters, mean over targets.
    """
    draws = predictive.draws.double()
    if predictive.noise is None:
        closed = predictive.closed_form
        return metrics.entropies(draws.mean(1) if closed is None else closed.double())
    epistemic = draws.var(1, correction=0)
    noise = predictive.noise.double()
    return (epistemic / (epistemic + noise)).mean(-1)


def ood_unit_scores(predictive: Predictive) -> Tensor:
    """Return the scores ``[K, B]`` in [0, 1]: entropies are divided by their largest, log C."""
    scores = ood_scores(predictive)
    return scores if predictive.noise is not None else scores / math.log(predictive.mean.shape[-1])


def ood_sums(own: Tensor, foreign: Tensor) -> dict[str, Tensor]:
    """Sum what tells a client's `own` samples from `foreign` ones, given scores in [0, 1].

    Both are ``[N]``, of any number of samples; see `metrics.metrics_of` and `ranking`.
    """
    scores = torch.cat([own, foreign])[:, None]
    strange = (torch.arange(len(scores), device=scores.device) >= len(own))[:, None]
    counts = ranking.histograms(scores, strange, ranking.FINEST)[0]
    return {"examples": own.new_tensor(len(own)), "strangeness": counts}
