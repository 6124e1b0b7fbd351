"""Results are written, read back, and turned into a frame."""

import json
import sys

import attrs
import pytest

from bflcore import OptionError, RunError
from bflcore.experiments.integrity import write_json
from bflcore.studies.cells import Cell
from bflcore.studies.results import Results, collect, read_study, write_study

from .quick import results, trial

FOUND = results({"a": [0.5, 0.7], "b": [0.9, 0.8]}, b={"lr": "0.1"})


def test_results_are_read_back_as_they_were_written(tmp_path):
    path = FOUND.write(tmp_path / "found.json")
    assert Results.read(path) == FOUND
    assert Results.read(path).of("a")[1].seconds == 1.0


def test_seconds_do_not_change_the_digest(tmp_path):
    digests = []
    for seconds in (1.0, 2.0):
        one = attrs.evolve(trial("a", 0, personal__nll=1.0), seconds=seconds)
        found = Results((Cell("a", "fedavg"),), (0,), (one,))
        digests.append(json.loads(found.write(tmp_path / "r.json").read_text())["digest"])
    assert digests[0] == digests[1]


def test_results_choose_and_compare(tmp_path):
    assert FOUND.best("personal.accuracy", "test").best == "b"
    assert FOUND.compare("b").against == "b"
    assert FOUND.values("a", "personal.accuracy") == {0: 0.5, 1: 0.7}
    assert FOUND.values("a", "absent") == {}
    assert list(FOUND.groups) == ["a", "b"]


def test_a_frame_has_a_row_per_run():
    pandas = pytest.importorskip("pandas")
    frame = FOUND.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["personal.accuracy"].tolist() == [0.5, 0.7, 0.9, 0.8]
    assert frame["lr"].tolist()[2:] == ["0.1", "0.1"]
    assert FOUND.frame("pooled")["personal.accuracy"][0] == 1.5


def test_a_frame_of_a_statistic_that_metrics_lack():
    pytest.importorskip("pandas")
    one = trial("a", 0, personal__nll=1.0, personal__brier=0.5)
    del one.metrics["personal.brier"]["pooled"]
    frame = Results((Cell("a", "fedavg"),), (0,), (one,)).frame("pooled")
    assert frame["personal.nll"][0] == 2.0
    assert frame["personal.brier"].isna().all()
    with pytest.raises(OptionError, match="unknown statistic 'median'.*: mean, pooled, std"):
        FOUND.frame("median")


def test_without_pandas_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RunError, match="frame needs pandas: pip install pandas"):
        FOUND.frame()


def test_results_that_are_not_there_or_damaged_are_refused(tmp_path):
    with pytest.raises(RunError, match="is missing: the study has not ended; run its command"):
        Results.read(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(RunError, match=r"results\.json cannot be read"):
        Results.read(tmp_path)
    write_json(tmp_path / "results.json", {"cells": []})
    with pytest.raises(RunError, match="does not have the form of a study's results"):
        Results.read(tmp_path)
    with pytest.raises(RunError, match="these results have no folder; give a path"):
        FOUND.write()


def test_a_study_is_read_back(tmp_path):
    cells = (Cell("a", "fedavg", {"rounds": 3}, {"model.hidden": [5]}, {"rounds": "3"}),)
    write_study(cells, (0, 2), tmp_path)
    assert read_study(tmp_path) == (cells, (0, 2))
    with pytest.raises(RunError, match="is not the folder of a sweep"):
        read_study(tmp_path / "absent")
    write_json(tmp_path / "study.json", {"cells": [{}], "seeds": []})
    with pytest.raises(RunError, match="does not have the form of a study"):
        read_study(tmp_path)


def test_runs_that_are_missing_or_damaged_are_failures(tmp_path):
    for seed in (0, 1):
        (tmp_path / "a" / f"seed-{seed}").mkdir(parents=True)
    (tmp_path / "a" / "seed-1" / "summary.json").write_text("{}")
    found = collect([Cell("a", "fedavg")], (0, 1, 2), tmp_path, {"a/seed-2": "why"})
    reasons = [one.failure for one in found.failures]
    assert reasons[0] == "it has not been run"
    assert "summary.json cannot be read" in reasons[1]
    assert reasons[2] == "why"


def test_a_run_whose_environment_is_missing_or_damaged_is_a_failure(tmp_path):
    summary = {"final": {}, "seconds": {"total": 1.0}, "bytes": {}}
    for seed in (0, 1, 2):
        (tmp_path / f"a/seed-{seed}").mkdir(parents=True)
        write_json(tmp_path / f"a/seed-{seed}/summary.json", summary)
    (tmp_path / "a/seed-1/environment.json").write_text("{")
    here = {"torch": "2", "machine": {"cores": 3}, "warnings": ["one"]}
    write_json(tmp_path / "a/seed-2/environment.json", here)
    found = collect([Cell("a", "fedavg")], (0, 1, 2), tmp_path, {})
    reasons = {one.seed: one.failure for one in found.failures}
    assert reasons.keys() == {0, 1}
    assert "environment.json is missing; restore the file" in reasons[0]
    assert "environment.json cannot be read" in reasons[1]
    assert (found.versions, found.machine) == (({"torch": "2"},), {"cores": 3})
