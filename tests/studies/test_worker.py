"""A worker starts a run, continues one, and answers with a reason."""

from pathlib import Path

import numpy as np

from bflcore.studies.worker import Task, answer

from .quick import FLAGS, OPTIONS

ALONE = FLAGS | {"workers": 1, "seed": 3}


def test_a_task_is_run_once_and_continued_where_it_stopped(tmp_path):
    task = Task(tmp_path / "run", "fedavg", ALONE, OPTIONS)
    assert answer(task) == ""
    summary = (task.path / "summary.json").read_text()
    started = (task.path / "environment.json").stat().st_mtime_ns
    (task.path / "summary.json").unlink()
    assert answer(task) == ""
    assert (task.path / "environment.json").stat().st_mtime_ns == started
    assert (task.path / "summary.json").read_text().partition('"seconds"')[0] == (
        summary.partition('"seconds"')[0]
    )


def test_what_a_killed_run_left_of_its_set_up_is_removed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "experiment.toml").write_text("half")
    assert answer(Task(tmp_path / "run", "fedavg", ALONE, OPTIONS)) == ""
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_run_of_data_in_memory_is_continued_with_them(tmp_path):
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(40, 3)).astype(np.float32), "y": np.arange(40) % 2}
    flags = {"data": data, "clients": 2, "rounds": 1, "workers": 1, "model": "linear"}
    task = Task(tmp_path / "run", "fedavg", flags, {})
    assert answer(task) == ""
    (task.path / "summary.json").unlink()
    assert answer(task) == ""


def test_a_mistake_and_a_defect_are_reasons_in_one_line(tmp_path, monkeypatch):
    task = Task(tmp_path / "run", "fedavg", ALONE | {"rounds": 0}, OPTIONS)
    assert answer(task) == "--rounds: 0 is not allowed; allowed: at least 1 and at most 1e+06"

    def broken(self):
        raise ValueError("two\nlines")

    monkeypatch.setattr(Task, "execute", broken)
    assert answer(task).startswith("unexpected ValueError: two lines at ")
    assert not Path(task.path).exists()
