"""Scoring a run: its clients' models are asked about shifted samples, through the public API."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import bflcore
from bfl_shift.scores import Outcome, foreign_scores, joined, labelled_scores, outcome_of
from bfl_shift.settings import Setting
from bfl_shift.shifts import Samples, Shift, foreign_of
from bflcore.data.base import Dataset
from bflcore.data.partition import Partition
from bflcore.errors import DataError
from bflcore.experiments.integrity import digest_of, read_json, write_json
from bflcore.files import make_folder
from bflcore.registry.loading import load_registry

__all__ = ["Scored", "data_set", "digest", "held_out", "score", "score_once"]

Array = Any  # of numpy
Scored = dict[str, Any]  # by shift: {"clients": {number: scores}, "pooled": scores}

FORMAT = 2  # of the files, and of what the scores mean


def score_once(
    path: Path, file: Path, setting: Setting, training: str, seed: int, shifts: Sequence[Shift]
) -> tuple[Scored, float]:
    """Return the scores of a finished run, and the seconds that it took to find them.

    Both are read from `file` where they are there.

    Raises `BflError` if the run or its data cannot be read.
    """
    known, seconds = _known(file, run := _run_digest(path))
    missing = [one for one in shifts if one.name not in known]
    if missing:
        began = time.monotonic()
        known = {**known, **score(path, setting, training, seed, missing)}
        seconds = round(seconds + time.monotonic() - began, 2)
        make_folder(file.parent, parents=True)
        write_json(file, {"format": FORMAT, "run": run, "shifts": known, "seconds": seconds})
    return {one.name: known[one.name] for one in shifts}, seconds


def score(
    path: Path, setting: Setting, training: str, seed: int, shifts: Sequence[Shift]
) -> Scored:
    """Return the scores of a finished run by shift: of each client, and pooled over samples."""
    run = bflcore.load(path)
    data = data_set(setting.data_of(training))
    tests = held_out(path, data)
    novel = len(run.clients) - int(setting.flags["novel_clients"])
    models = [run.client(client) for client in run.clients]
    trained = {number: one for number, one in tests.items() if number < novel}
    own: dict[int, Outcome] = {}

    def asked(number: int, samples: Samples) -> Outcome:
        prediction: Any = models[number].predict(samples.x)
        return outcome_of(prediction, samples.y)

    found: Scored = {}
    for shift in shifts:
        numbers = [number for number in tests if (number >= novel) == shift.novel]
        if not shift.foreign:
            among = tests if shift.novel else trained
            outcomes = {n: asked(n, shift.of(among, n, seed)) for n in numbers}
            clients = {n: labelled_scores(one) for n, one in outcomes.items()}
            pooled = labelled_scores(joined([*outcomes.values()]))
        else:
            own |= {n: asked(n, tests[n]) for n in numbers if n not in own}
            images = data_set(shift.foreign).x
            shape = data.x.shape[1:]
            strange = {n: foreign_of(images, shape, seed, n, shift.name) for n in numbers}
            outcomes = {n: asked(n, _foreign(x)) for n, x in strange.items()}
            clients = {n: foreign_scores(own[n], one) for n, one in outcomes.items()}
            pooled = foreign_scores(joined([own[n] for n in numbers]), joined([*outcomes.values()]))
        found[shift.name] = {"clients": {str(n): s for n, s in clients.items()}, "pooled": pooled}
    return found


def digest(scores: Any) -> str:
    """Return what identifies the scores of a run under one shift, to the bit."""
    return digest_of(scores)[:16]


def held_out(path: Path, data: Dataset) -> dict[int, Samples]:
    """Return the test samples of a run's clients, by number; those without are left out."""
    rows = Partition.load(path / "partition.npz").test
    found = {n: Samples(data.x[own], np.asarray(data.y)[own]) for n, own in enumerate(rows)}
    return {n: one for n, one in found.items() if len(one.y)}


@lru_cache(maxsize=4)
def data_set(name: str) -> Dataset:
    """Return a data set of images. Raises `DataError` saying how to get it."""
    source = load_registry().datasets[name]
    data = source().load()
    if data.x.ndim != 4:
        raise DataError(f"{name} has samples of shape {list(data.x.shape[1:])}; allowed: images")
    return data


def _foreign(x: Array) -> Samples:
    return Samples(x, np.full(len(x), -1))


def _run_digest(path: Path) -> str:
    """Return what identifies a finished run."""
    found = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    return str(found["digest"])


def _known(file: Path, run: str) -> tuple[Scored, float]:
    """Return the scores in a file that are of this run, and their seconds; none of another one."""
    try:
        found = read_json(file)
    except FileNotFoundError:
        return {}, 0.0
    same = (found.get("format"), found.get("run")) == (FORMAT, run)
    return (found["shifts"], found["seconds"]) if same else ({}, 0.0)
