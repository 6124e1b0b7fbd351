"""What is compared: cells of studies and single runs, which form cells by their settings."""

import shutil

import numpy as np
import pytest

import bflcore
from bflcore import RunError
from bflcore.experiments.integrity import read_json, write_json
from bflcore.report.comparison import by_settings
from bflcore.report.reading import read_runs
from bflcore.studies.comparison import compare
from bflcore.studies.gathering import gather, is_study, read_results
from bflcore.studies.results import collect, run_folder, write_study

from .quick import FLAGS, OPTIONS, cell


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a study of two cells and with three single runs."""
    path = tmp_path_factory.mktemp("gathered")
    cells = [cell("a"), cell("b", flags={"lr": 0.05})]
    write_study_of(path / "study", cells, (0, 1))
    for name, seed, rounds in (("x0", 0, 2), ("x1", 1, 2), ("y0", 0, 1)):
        flags = FLAGS | {"rounds": rounds, "seed": seed, "workers": 1}
        bflcore.run("fedavg", out=path / name, options=OPTIONS, **flags)
    return path


def write_study_of(path, cells, seeds):
    """Execute a study in this process."""
    for one in cells:
        for seed in seeds:
            out = path / run_folder(one.name, seed)
            flags = {**one.flags, "seed": seed, "workers": 1}
            bflcore.run(one.method, out=out, options=one.options, **flags)
        (path / one.name / "cell.toml").write_text("")
    write_study(cells, seeds, path)
    collect(cells, seeds, path, {}).write()


def test_cells_of_a_study_and_single_runs_are_gathered(folder):
    found = gather([folder / "study", folder / "x0", folder / "y0", folder / "x1"]).groups
    seeds = {name: [trial.seed for trial in trials] for name, trials in found.items()}
    assert seeds == {"a": [0, 1], "b": [0, 1], "x0": [0, 1], "y0": [0]}
    ours, same = found["a"][1], found["x0"][1]
    assert ours.metrics == same.metrics
    assert same.path == folder / "x1"


def test_results_of_several_studies_are_told_apart(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "results.json").write_text((folder / "study" / "results.json").read_text())
    found = gather([folder / "study", other / "results.json"]).groups
    assert list(found) == ["study/a", "study/b", "other/a", "other/b"]


def test_a_run_of_a_study_is_called_by_its_cell(folder):
    found = gather([folder / "study" / "b" / "seed-1", folder / "study" / "a" / "seed-0"]).groups
    assert list(found) == ["b", "a"]


def test_a_run_that_was_repeated_counts_once(folder):
    said = []
    repeated = [folder / "x0", folder / "study" / "a" / "seed-0", folder / "x1" / ".." / "x0"]
    found = gather(repeated, said.append).groups
    assert [len(trials) for trials in found.values()] == [1]
    assert "seed-0: the same settings, data and seed as" in said[0]
    assert "x0 is given twice" in said[1]


def test_cells_of_different_studies_are_never_one(tmp_path):
    """Two sweeps of one name with other rates, and a run that is called like a cell."""
    for day, rate, seed in (("mon", 0.1, 0), ("wed", 0.001, 1)):
        write_study_of(tmp_path / day / "sweep", [cell("fedavg", flags={"lr": rate})], (seed,))
    days = [tmp_path / day / "sweep" for day in ("mon", "wed")]
    found = gather(days).groups
    assert {name: [one.seed for one in trials] for name, trials in found.items()} == {
        "mon/sweep/fedavg": [0],
        "wed/sweep/fedavg": [1],
    }
    shutil.copytree(days[1] / "fedavg" / "seed-1", tmp_path / "fedavg")
    found = gather([tmp_path / "fedavg", days[0]]).groups
    assert {name: [one.seed for one in trials] for name, trials in found.items()} == {
        "fedavg": [1],
        "fedavg (2)": [0],
    }


@pytest.mark.parametrize("same_seed", [False, True])
def test_runs_on_other_data_are_other_cells(tmp_path, same_seed):
    rng = np.random.default_rng(0)
    flags = {"clients": 2, "rounds": 1, "local_epochs": 1, "model": "linear", "workers": 1}
    file = tmp_path / "data.npz"
    for place, kind in (("one", "memory"), ("two", "memory"), ("three", "file"), ("four", "file")):
        arrays = {"x": rng.normal(size=(30, 2)).astype(np.float32), "y": np.arange(30) % 2}
        np.savez(file, **arrays)
        seed = 0 if same_seed else ("one", "two", "three", "four").index(place)
        data = arrays if kind == "memory" else file
        bflcore.run("fedavg", data=data, seed=seed, out=tmp_path / place, **flags)
    places = [tmp_path / place for place in ("one", "two", "three", "four")]
    assert [len(trials) for trials in gather(places).groups.values()] == [1, 1, 1, 1]
    assert [len(group.runs) for group in by_settings(read_runs(places))] == [1, 1, 1, 1]


def test_the_report_and_a_comparison_form_the_same_groups(folder, tmp_path):
    """Runs that differ in the seed and in how they were executed are a group in both."""
    flags = FLAGS | {"seed": 3, "workers": 2, "checkpoint_every": 2, "min_clients": 0}
    bflcore.run("fedavg", out=tmp_path / "x3", options=OPTIONS, **flags)
    paths = [folder / "x0", tmp_path / "x3", folder / "y0"]
    assert [len(trials) for trials in gather(paths).groups.values()] == [2, 1]
    assert [len(group.runs) for group in by_settings(read_runs(paths))] == [2, 1]


def test_what_cannot_be_read_is_left_out_by_name(folder, tmp_path):
    said = []
    assert list(gather([folder / "x0", tmp_path], said.append).groups) == ["x0"]
    assert "is not a run directory" in said[0]
    with pytest.raises(RunError, match="is not a run directory"):
        gather([tmp_path])
    with pytest.raises(RunError, match="nothing is given to compare"):
        gather([])


def test_a_study_that_has_not_ended_is_read_as_far_as_it_is(folder):
    assert is_study(folder / "study")
    assert not is_study(folder / "x0")
    results = folder / "study" / "results.json"
    text = results.read_text()
    results.unlink()
    try:
        assert [len(trials) for trials in read_results(folder / "study").groups.values()] == [2, 2]
    finally:
        results.write_text(text)


def test_versions_that_differ_are_told(folder, tmp_path):
    """A run of an earlier version beside one of this version."""
    shutil.copytree(folder / "y0", tmp_path / "old")
    file = tmp_path / "old" / "environment.json"
    known = read_json(file)
    write_json(file, {**known, "torch": "1.0"})
    found = gather([folder / "x0", tmp_path / "old"])
    told = compare(found.groups, versions=found.versions).meaning
    assert f"different versions (torch: {known['torch']}, 1.0)" in told
    alike = gather([folder / "x0", folder / "y0", folder / "study"])
    assert "versions" not in compare(alike.groups, versions=alike.versions).meaning
