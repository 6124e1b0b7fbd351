"""Label priors: clients that share p(x | y) and differ in how frequent the labels are.

By Bayes' rule p_k(y | x) is proportional to p(x | y) p_k(y). If the network's logits stand for
log p(x | y), those of client k are the network's plus log p_k(y) (Menon et al. 2021, eq. 10, where
the prior is one for all samples; here each client has its own).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.messages import Cohort
else:
    torch = lazy("torch")

__all__ = ["LABEL_COUNTS", "label_counts", "log_label_prior"]

LABEL_COUNTS = "label_counts"  # name of the counts in a survey, and in a client's memory


def label_counts(cohort: Cohort, classes: int) -> Tensor:
    """Return how many training samples ``[K, C]`` of each class the clients have.

    For a `LocalInference.survey` of a classification with C `classes`.
    """
    labels = zip(cohort.y, cohort.sizes, strict=True)
    return torch.stack([torch.bincount(y[:size], minlength=classes) for y, size in labels])


def log_label_prior(counts: Tensor, pooled: Tensor, strength: float) -> Tensor:
    """Return log p_k(y) ``[C]``, in nats, of a client with `counts` ``[C]`` of each label.

    The mean of p_k under a Dirichlet prior: (counts + strength m) / (n + strength), where the base
    measure m is that of all clients' counts `pooled` ``[C]``, with one sample more that is divided
    equally among the labels: no probability is 0. A client without samples has p_k = m.
    """
    counts, pooled = counts.double(), pooled.double()
    base = (pooled + 1 / len(pooled)) / (pooled.sum() + 1)
    return ((counts + strength * base) / (counts.sum() + strength)).log()
