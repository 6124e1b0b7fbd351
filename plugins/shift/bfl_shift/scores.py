"""Scores of predictions: how good they are, and what their uncertainties are worth."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from scipy.stats import rankdata

from bflcore.api import ClassPrediction
from bflcore.errors import RunError
from bflcore.problem.directions import direction
from bflcore.problem.metrics import classification_sums, metrics_of

__all__ = [
    "BETTER",
    "COVERAGE",
    "Outcome",
    "area_under_risk",
    "auroc",
    "false_positives",
    "foreign_scores",
    "joined",
    "labelled_scores",
    "outcome_of",
]

Array = Any  # of numpy

COVERAGE = 0.9  # of the conformal sets
BINS = 10  # of the calibration error
ACCEPTED = 0.95  # share of a client's own samples that must not be taken for foreign

# Which way is better; the others only describe.
BETTER: Mapping[str, int] = {
    **{name: direction(name) for name in ("accuracy", "nll", "brier", "ece", "aurc")},
    "worse_off": -1,
    **{name: direction(name) for name in ("auroc", "fpr95")},
    "auroc_epistemic": 1,
}


@attrs.frozen(eq=False)
class Outcome:
    """What a model predicts for B samples, and their labels (-1 for foreign samples).

    `probabilities` ``[B, C]``, `inside` ``[B, C]`` the conformal sets, `labels`, `entropy`,
    `epistemic` and `aleatoric` ``[B]``.
    """

    probabilities: Array
    labels: Array
    inside: Array
    entropy: Array
    epistemic: Array
    aleatoric: Array


def outcome_of(prediction: ClassPrediction, labels: Array) -> Outcome:
    """Return a prediction as arrays. Raises `RunError` if it is not finite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too few calibration samples: everything is in the set
        inside = prediction.contains(COVERAGE)
    found = prediction.probabilities, labels, inside, prediction.entropy
    parts = [np.asarray(one) for one in (*found, prediction.epistemic, prediction.aleatoric)]
    if not all(np.isfinite(part).all() for part in parts):
        raise RunError("its predictions are not finite")
    return Outcome(*parts)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcomes of several clients as one."""
    columns = zip(*(attrs.astuple(one, recurse=False) for one in outcomes), strict=True)
    return Outcome(*(np.concatenate(column) for column in columns))


def labelled_scores(outcome: Outcome) -> dict[str, float]:
    """Return the scores of predictions of samples with labels."""
    p, y = torch.as_tensor(outcome.probabilities), torch.as_tensor(outcome.labels)
    found = metrics_of(classification_sums(p[None], y, BINS, by_class=False))
    rows = np.arange(len(outcome.labels))
    wrong = outcome.probabilities.argmax(1) != outcome.labels
    return {
        **{name: found[name] for name in ("accuracy", "nll", "brier", "ece")},
        "aurc": area_under_risk(outcome.probabilities.max(1), wrong),
        "coverage": float(outcome.inside[rows, outcome.labels].mean()),
        **_uncertainties(outcome),
    }


def foreign_scores(own: Outcome, foreign: Outcome) -> dict[str, float]:
    """Return how well uncertainties tell `foreign` samples from a client's `own`.

    By the entropy of the prediction: `auroc`, and `fpr95`, the share of foreign samples that pass
    where 95 % of the own ones do. `auroc_epistemic` is by epistemic uncertainty alone (0.5 for
    methods without).
    """
    return {
        "auroc": auroc(own.entropy, foreign.entropy),
        "fpr95": false_positives(own.entropy, foreign.entropy),
        "auroc_epistemic": auroc(own.epistemic, foreign.epistemic),
        **_uncertainties(foreign),
    }


def _uncertainties(outcome: Outcome) -> dict[str, float]:
    return {
        "set_size": float(outcome.inside.sum(1).mean()),
        "entropy": float(outcome.entropy.mean()),
        "epistemic": float(outcome.epistemic.mean()),
        "aleatoric": float(outcome.aleatoric.mean()),
    }


def area_under_risk(confidence: Array, wrong: Array) -> float:
    """Return the area under the risk-coverage curve (Geifman et al. 2019, section 2).

    The mean over i of the error rate among the i samples ``[B]`` of the largest confidence. Samples
    of equal confidence are in any order, all equally likely: each counts as wrong to the same part.
    (A run's own `aurc` ranks by entropy, in bins, so that clients' sums add up.)
    """
    _, group = np.unique(-np.asarray(confidence, np.float64), return_inverse=True)
    share = np.bincount(group, wrong) / np.bincount(group)
    errors = np.cumsum(share[np.sort(group)])
    return float(np.mean(errors / np.arange(1, len(errors) + 1)))


def auroc(own: Array, foreign: Array) -> float:
    """Return the probability that a foreign score exceeds an own one, ties counting half.

    The area under the ROC curve, from ranks (Mann & Whitney 1947).
    """
    ranks = rankdata(np.concatenate([own, foreign]))[len(own) :]
    pairs = len(own) * len(foreign)
    return float((ranks.sum() - len(foreign) * (len(foreign) + 1) / 2) / pairs)


def false_positives(own: Array, foreign: Array) -> float:
    """Return the share of foreign scores up to the smallest that accepts 95 % of the own ones."""
    rank = int(np.ceil(ACCEPTED * len(own) - 1e-9))
    return float(np.mean(np.asarray(foreign) <= np.sort(own)[rank - 1]))
