"""A study goes on after a failure or a kill, and its results do not depend on how it ran."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from bflcore import OptionError, RunError
from bflcore.report.comparison import by_settings
from bflcore.report.reading import read_runs
from bflcore.studies.cells import Cell
from bflcore.studies.execution import Standing, duration, execute, resolve_cells
from bflcore.studies.results import Results

from .quick import FLAGS, OPTIONS, cell

NETS = """
from torch import nn

def raises(input_shape, outputs):
    raise KeyError("nothing")

def works(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(6, outputs))
"""


def without_seconds(folder):
    found = json.loads((folder / "results.json").read_text())
    del found["seconds"]
    return json.dumps(found)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return a folder in which two cells have been executed with a seed, one run at a time."""
    folder, seen = tmp_path_factory.mktemp("original") / "study", []
    found = execute([cell("a"), cell("b", "fedvi")], (0,), folder, jobs=1, progress=seen.append)
    return folder, found, seen


@pytest.fixture
def study(original, tmp_path):
    """Return a copy of that folder."""
    return shutil.copytree(original[0], tmp_path / "study")


def test_results_are_what_the_runs_wrote_and_are_read_back(original):
    folder, found, seen = original
    for name in "ab":
        summary = json.loads((folder / name / "seed-0" / "summary.json").read_text())
        expected = summary["final"]["personal.nll"]["mean"]
        assert found.values(name, "personal.nll") == {0: expected}
        assert found.of(name)[0].bytes == summary["bytes"]
    assert Results.read(folder).as_json() == found.as_json()
    assert (found.versions[0]["torch"] != "", found.machine["cores"] > 0) == (True, True)
    assert [at.ended for at in seen if at.ended] == ["a/seed-0", "b/seed-0"]
    assert [at.done for at in seen if at.ended] == [1, 2]
    assert (seen[0].done, seen[0].total, seen[-1].left, seen[-1].running) == (0, 2, 0, ())


def test_results_do_not_depend_on_how_many_runs_are_executed_at_a_time(original, tmp_path):
    execute([cell("a"), cell("b", "fedvi")], (0,), tmp_path, jobs=3)
    assert without_seconds(tmp_path) == without_seconds(original[0])


def test_what_is_finished_is_kept_and_seeds_and_cells_may_be_added(study):
    before = (study / "a" / "seed-0" / "summary.json").stat().st_mtime_ns
    seen = []
    cells = [cell("a"), cell("c")]
    found = execute(cells, (0, 1), study, jobs=1, progress=seen.append)
    assert seen[0].done == 1
    assert (study / "a" / "seed-0" / "summary.json").stat().st_mtime_ns == before
    assert [one.ended for one in seen if one.ended] == ["c/seed-0", "a/seed-1", "c/seed-1"]
    assert [len(found.of(name)) for name in "ac"] == [2, 2]


def test_a_run_that_fails_is_recorded_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETS)
    options = {name: value for name, value in OPTIONS.items() if name != "model.hidden"}
    cells = [
        Cell(name, "fedavg", FLAGS | {"model": f"nets.py:{name}"}, options)
        for name in ("raises", "works")
    ]
    many = cell("many", flags={"clients": 99})
    found = execute([*cells, many], (0,), tmp_path / "study", jobs=1)
    reasons = {trial.cell: trial.failure for trial in found.failures}
    assert reasons.keys() == {"raises", "many"}
    assert "nets.py:raises failed" in reasons["raises"]
    assert "--clients: 99" in reasons["many"]
    assert len(found.of("works")) == 1
    assert all("\n" not in reason for reason in reasons.values())
    assert Results.read(tmp_path / "study").failures == found.failures


def test_runs_of_other_settings_are_refused_and_left_alone(study):
    before = without_seconds(study), (study / "a" / "cell.toml").read_text()
    with pytest.raises(RunError, match=r"a: its runs were made with .*rounds was 2 and is 3\)"):
        execute([cell("a", flags={"rounds": 3})], (0,), study)
    options = {f"dataset.{name}": 7 for name in ("samples", "features", "owners", "classes")}
    with pytest.raises(RunError, match=r"and 1 more\); choose another folder, or remove it"):
        execute([cell("a", options=options)], (0,), study)
    assert (without_seconds(study), (study / "a" / "cell.toml").read_text()) == before
    (study / "a" / "cell.toml").unlink()
    with pytest.raises(RunError, match=r"has runs, but no cell\.toml that can be read"):
        execute([cell("a")], (0,), study)


def test_data_that_changed_are_other_settings(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(60, 3)).astype(np.float32), "y": np.arange(60) % 2}
    flags = {"clients": 2, "rounds": 1, "local_epochs": 1, "model": "linear"}
    np.savez(tmp_path / "data.npz", **arrays)
    of_file = Cell("file", "fedavg", {**flags, "data": tmp_path / "data.npz"})
    in_memory = Cell("memory", "fedavg", {**flags, "data": arrays})
    first = execute([of_file, in_memory], (0,), tmp_path / "study", jobs=1)
    assert first.failures == ()
    assert first.values("file", "personal.nll") == first.values("memory", "personal.nll")
    arrays["x"] += 1
    with pytest.raises(RunError, match="memory: .*content of the data was"):
        execute([in_memory], (0,), tmp_path / "study")
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(RunError, match="file: .*content of the data was"):
        execute([of_file], (0,), tmp_path / "study")


def test_a_study_goes_on_wherever_its_data_are(tmp_path):
    """Also where its runs were begun by an earlier version, whose settings have the folder."""
    flags = {"data": "digits", "clients": 2, "rounds": 1, "local_epochs": 1, "model": "linear"}
    folder, kept = tmp_path / "study", tmp_path / "study" / "a" / "cell.toml"
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
    first = execute([Cell("a", "fedavg", flags)], (0,), folder, jobs=1)
    text = kept.read_text()
    assert "data_dir" not in text
    there = Cell("a", "fedavg", flags | {"data_dir": tmp_path / "one"})
    kept.write_text(text.replace('data = "digits"', 'data = "digits"\ndata_dir = "/old"'))
    assert (
        execute([there], (0, 1), folder, jobs=1).values("a", "personal.nll")[0]
        == (first.values("a", "personal.nll")[0])
    )
    assert kept.read_text() == text
    runs = [folder / "a" / f"seed-{seed}" for seed in (0, 1)]
    assert [len(group.runs) for group in by_settings(read_runs(runs))] == [2]


def test_lines_say_what_ended_why_and_how_long_is_left():
    found = [
        Standing(0, 4, 0, ()),
        Standing(0, 4, 0, ("a/seed-0",)),
        Standing(1, 4, 0, (), 300.0, "a/seed-0"),
        Standing(4, 4, 1, (), 0.0, "b/seed-0", "a reason"),
    ]
    assert [at.line(Path("s")) for at in found] == [
        "4 runs in s, 0 of them finished",
        "",
        "1/4  a/seed-0  done  5 min left",
        "4/4  b/seed-0  failed: a reason",
    ]
    assert [duration(s) for s in (3.4, 89, 91, 7200)] == ["3 s", "89 s", "2 min", "2.0 h"]


def test_two_studies_do_not_share_a_folder(tmp_path):
    with FileLock(tmp_path / ".lock"), pytest.raises(RunError, match="another process is executi"):
        execute([cell("a")], (0,), tmp_path)
    assert not (tmp_path / "a").exists()


def test_nothing_is_written_unless_every_cell_is_valid(tmp_path):
    folder = tmp_path / "study"
    for bad, message in (
        (cell("b", "fedavgg"), "cell b: unknown method 'fedavgg'"),
        (cell("b", flags={"round": 1}), "cell b: unknown flag 'round'"),
        (
            cell("b", options={"inference.x": 1}),
            "cell b: inference: unknown option 'x'|cell b: .*x",
        ),
        (cell("b", flags={"rounds": 0}), "cell b: --rounds: 0 is not allowed"),
    ):
        with pytest.raises(OptionError, match=message):
            execute([cell("a"), bad], (0,), folder)
    with pytest.raises(OptionError, match="--jobs: 0 is not allowed"):
        execute([cell("a")], (0,), folder, jobs=0)
    with pytest.raises(OptionError, match="--seeds: none is given"):
        execute([cell("a")], (), folder)
    assert not folder.exists()


def test_a_cell_is_resolved_with_its_methods_settings():
    found = resolve_cells([cell("a", flags={"local_epochs": 7})])
    assert found["a"].inference.local_epochs == 7


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from quick import cell
from bflcore.studies.execution import execute
# No guard: a worker process does not import this file again.
cells = [cell("a", flags={"rounds": 12}), cell("b", "fedvi", {"rounds": 12})]
execute(cells, (0,), Path(sys.argv[1]), jobs=2)
"""


def started(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [sys.executable, str(program), str(tmp_path / "cut"), str(Path(__file__).parent)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True, text=True)


def wait_for(what, process):
    end = time.monotonic() + 300
    while not what():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.01)


def children(pid):
    lists = Path(f"/proc/{pid}/task").glob("*/children")  # each thread has its own
    return [int(word) for path in lists for word in path.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
def test_a_study_that_was_killed_goes_on_to_the_same_results(tmp_path):
    cells = [cell("a", flags={"rounds": 12}), cell("b", "fedvi", {"rounds": 12})]
    cut = tmp_path / "cut"
    process = started(tmp_path)
    wait_for(lambda: len([*cut.glob("*/seed-*/checkpoint/*.safetensors")]) > 1, process)
    workers = children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    end = time.monotonic() + 60
    while any("\nState:\tZ" not in state(pid) for pid in workers):
        assert time.monotonic() < end, "a worker outlived its study"
        time.sleep(0.02)
    assert len(workers) == 2
    assert not (cut / "results.json").exists()
    assert len([*cut.glob("*/seed-*/summary.json")]) < 2
    execute(cells, (0,), cut, jobs=2)
    execute(cells, (0,), tmp_path / "whole", jobs=2)
    assert without_seconds(cut) == without_seconds(tmp_path / "whole")


def state(pid):
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "\nState:\tZ"


def test_a_run_that_was_interrupted_during_set_up_begins_again(study):
    expected = without_seconds(study)
    for path in (study / "a" / "seed-0").iterdir():
        if path.name != "experiment.toml":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    execute([cell("a"), cell("b", "fedvi")], (0,), study)
    assert without_seconds(study) == expected


def test_a_run_that_cannot_be_continued_unchanged_is_a_failure(study):
    run = study / "a" / "seed-0"
    (run / "summary.json").unlink()
    text = (run / "experiment.toml").read_text()
    (run / "experiment.toml").write_text(text.replace("lr = 0.001", "lr = 0.002"))
    found = execute([cell("a"), cell("b", "fedvi")], (0,), study)
    assert [one.cell for one in found.failures] == ["a"]
    assert "cannot resume" in found.failures[0].failure


def test_data_that_cannot_be_sent_to_a_process_are_refused(tmp_path):
    class Odd:
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return np.zeros(2, dtype=np.float32), i % 2

        def __reduce__(self):
            raise TypeError("no")

    cells = [Cell("a", "fedavg", {"data": Odd(), "clients": 2})]
    with pytest.raises(OptionError, match="cannot be sent to another process .TypeError: no"):
        execute(cells, (0,), tmp_path)
