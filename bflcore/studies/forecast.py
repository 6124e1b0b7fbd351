"""What runs will read and record, found out before the first of them starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from bflcore.data.foreign import automatic
from bflcore.errors import BflError
from bflcore.experiments.integrity import read_json
from bflcore.lazy import lazy
from bflcore.options import as_dict
from bflcore.studies.results import run_folder
from bflcore.studies.trials import final_metrics

if TYPE_CHECKING:
    import torch

    from bflcore.data.base import Dataset
    from bflcore.data.tables import Table
    from bflcore.data.user import Arrays
    from bflcore.experiments import prepare
    from bflcore.experiments.resolve import Experiment
    from bflcore.problem import metrics
    from bflcore.problem.calibration import base as calibration
else:
    torch = lazy("torch")
    calibration = lazy("bflcore.problem.calibration.base")
    metrics = lazy("bflcore.problem.metrics")
    prepare = lazy("bflcore.experiments.prepare")

__all__ = ["Check", "look_ahead"]

Check = Callable[[set[str]], None]

OUT_OF_DISTRIBUTION = ("auroc", "fpr95")
READ = ("data", "data_dir", "download", "target", "client", "task", "drop")  # to load the data


Resolved = Mapping[str, "tuple[Experiment, Table | Arrays | None]"]  # by the cells' names


@attrs.frozen
class Data:
    """What is known of a data set once it was loaded."""

    task: str
    outputs: int
    has_foreign: bool  # --ood auto finds samples unlike these


def look_ahead(
    cells: Resolved, seeds: Sequence[int], folder: Path, check: Check | None = None
) -> None:
    """Load the data of all cells that have runs to execute, each data set once.

    What is to be downloaded is there afterwards. `check` is called with the names of the metrics
    that the runs record. Raises `BflError`, naming the cell, for data that cannot be loaded.
    """
    known: dict[str, Data] = {}
    names = set[str]()
    for name, (experiment, own) in cells.items():
        runs = [folder / run_folder(name, seed) / "summary.json" for seed in seeds]
        if all(run.is_file() for run in runs):
            names |= {*final_metrics(read_json(runs[0]))}
            continue
        settings, likelihood = as_dict(experiment.data), experiment.likelihood
        read = {key: settings.get(key) for key in READ} | as_dict(experiment.dataset)
        key = json.dumps([read, likelihood and likelihood.task, own is not None and id(own)])
        try:
            known[key] = data = known.get(key) or _data(prepare.load_dataset(experiment, own))
        except BflError as error:
            raise type(error)(f"cell {name}: {error}") from None
        names |= _metric_names(experiment, data) if check else set()
    if check:
        check(names)


def _data(dataset: Dataset) -> Data:
    return Data(dataset.task, dataset.outputs, automatic(dataset) is not None)


def _metric_names(experiment: Experiment, data: Data) -> set[str]:
    """Return the names of the metrics that a run records at its end.

    Those that turn out to be undefined are among them, and so are the server's if the head of the
    network is shared, which may be all of it.
    """
    settings, names = experiment.data, _of_predictions(data)
    models = {"personal": names}
    if experiment.run.share in {"all", "head"}:
        models["global"] = names
    if settings.novel_clients:
        models["novel"] = names
    if settings.calibration_fraction:
        calibrated = names | _of_regions(data)
        models |= {"calibrated": calibrated}
        models |= {"novel.calibrated": calibrated} if settings.novel_clients else {}
    found = {f"{model}.{name}" for model, known in models.items() for name in known}
    if settings.validation_fraction:
        found |= {f"validation.{name.removeprefix('personal.')}" for name in found}
    if data.has_foreign if settings.ood == "auto" else settings.ood != "none":
        found |= {f"ood.{name}" for name in OUT_OF_DISTRIBUTION}
    return found


def _of_predictions(data: Data) -> set[str]:
    """Return the metrics of predictions: those of two samples that were predicted alike."""
    if data.task == "regression":
        mean = torch.zeros(2, 1)
        return {*metrics.metrics_of(metrics.regression_sums(mean, mean + 1, torch.eye(2)[:, :1]))}
    classes = max(2, data.outputs)
    probabilities = torch.full((1, 2, classes), 1 / classes)
    sums = metrics.classification_sums(probabilities, torch.arange(2))
    return {*metrics.metrics_of(sums)}


def _of_regions(data: Data) -> set[str]:
    """Return the metrics of calibrated runs' sets or intervals."""
    region, size = ("interval", "width") if data.task == "regression" else ("set", "size")
    levels = calibration.LEVELS
    coverage = {f"{region}_coverage{level}" for level in levels}
    return coverage | {f"{region}_{size}{level}" for level in levels} | {"out_of_distribution"}
