"""What is compared: cells of studies and single runs, which form cells by their settings."""

import pytest

import bflcore
from bflcore import RunError
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
    found = gather([folder / "study", folder / "x0", folder / "y0", folder / "x1"])
    seeds = {name: [trial.seed for trial in trials] for name, trials in found.items()}
    assert seeds == {"a": [0, 1], "b": [0, 1], "x0": [0, 1], "y0": [0]}
    ours, same = found["a"][1], found["x0"][1]
    assert ours.metrics == same.metrics
    assert same.path == folder / "x1"


def test_results_of_several_studies_are_told_apart(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "results.json").write_text((folder / "study" / "results.json").read_text())
    found = gather([folder / "study", other / "results.json"])
    assert list(found) == ["study/a", "study/b", "other/a", "other/b"]


def test_a_run_of_a_study_is_called_by_its_cell(folder):
    found = gather([folder / "study" / "b" / "seed-1", folder / "study" / "a" / "seed-0"])
    assert list(found) == ["b", "a"]


def test_a_run_that_was_repeated_counts_once(folder):
    said = []
    found = gather([folder / "x0", folder / "study" / "a" / "seed-0"], said.append)
    assert [len(trials) for trials in found.values()] == [1]
    assert "the same settings and seed as" in said[0]


def test_what_cannot_be_read_is_left_out_by_name(folder, tmp_path):
    said = []
    assert list(gather([folder / "x0", tmp_path], said.append)) == ["x0"]
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
