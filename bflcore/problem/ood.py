"""How unlike the training samples a sample looks: the out-of-distribution score."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore.problem import metrics

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.problem.likelihoods import Predictive

__all__ = ["ood_scores"]


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
