"""A sweep from Python: cells, results, tables and the choice."""

import csv
import inspect

import pytest

import bflcore
from bflcore import OptionError
from bflcore.studies import sweeps
from bflcore.studies.cells import Cell
from bflcore.studies.sweeps import check_choice, default_folder, write_tables

from .quick import FLAGS, OPTIONS, results


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return bflcore.sweep(
        ["fedavg", "fedvi"],
        grid={"lr": [0.001, 0.05]},
        seeds=range(2),
        out=tmp_path_factory.mktemp("sweep") / "out",
        jobs=1,
        options=OPTIONS,
        validation_fraction=0.2,
        **FLAGS,
    )


def test_a_sweep_runs_every_combination_with_every_seed(found):
    names = [f"{method},lr={lr}" for method in ("fedavg", "fedvi") for lr in (0.001, 0.05)]
    assert [cell.name for cell in found.cells] == names
    assert all(len(found.of(name)) == 2 for name in names)
    assert found.best("personal.nll").best in names
    compared = found.compare("fedavg,lr=0.05", ["personal.accuracy"], over="clients")
    assert [row.difference.n for row in compared.rows if row.difference] == [6, 6, 6]


def test_its_tables_and_its_picture_are_written(found):
    folder = found.folder
    text = (folder / "table.md").read_text()
    assert text.splitlines()[0].startswith("| cell | n | personal.accuracy |")
    assert "Mean and standard deviation over seeds" in text
    rows = list(csv.DictReader((folder / "table.csv").read_text().splitlines()))
    assert [row["lr"] for row in rows] == ["0.001", "0.05"] * 2
    values = found.values("fedavg,lr=0.05", "validation.nll").values()
    assert float(rows[1]["validation.nll mean"]) == pytest.approx(sum(values) / 2)
    assert ">lr<" in (folder / "plot.svg").read_text()


def test_metrics_of_the_tables_may_be_chosen(found):
    before = (found.folder / "table.md").read_text()
    assert write_tables(found, ["personal.brier"]) == ("personal.brier",)
    assert (found.folder / "table.md").read_text() != before
    with pytest.raises(OptionError, match=r"unknown metric of --metric 'x'"):
        write_tables(found, ["x"])
    assert write_tables(results({"a": []})) == ()


def test_progress_is_printed_if_asked_for(found, capsys):
    given = {"out": found.folder, "seeds": "0-1", "options": OPTIONS, "validation_fraction": 0.2}
    bflcore.sweep("fedvi", grid={"lr": [0.05]}, **given, **FLAGS)
    assert capsys.readouterr().out == ""
    bflcore.sweep("fedvi", grid={"lr": [0.05]}, progress=True, **given, **FLAGS)
    assert capsys.readouterr().out == f"2 runs in {found.folder}, 2 of them finished\n"


def test_a_choice_that_cannot_be_made_is_refused_before_anything_is_run():
    cells = [Cell("a", "fedavg", FLAGS), Cell("b", "fedavg", FLAGS | {"validation_fraction": 0.2})]
    with pytest.raises(OptionError, match="cell a holds no samples out for validation; add --vali"):
        check_choice(cells, "personal.nll", "validation")
    check_choice(cells[1:], "personal.nll", "validation")
    check_choice(cells, "personal.nll", "test")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": [0, 0]}, "a seed is given twice"),
        ({"seeds": [0.5]}, "seeds: 0.5 is not allowed"),
        ({"seeds": "3-1"}, "'3-1' is not allowed"),
        ({"seeds": []}, "--seeds: none is given"),
        ({"grid": {"ruonds": [1]}}, "unknown flag of --grid 'ruonds'"),
        ({"round": 1}, "cell fedavg: unknown flag 'round'"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(tmp_path, given, message):
    with pytest.raises(OptionError, match=message):
        bflcore.sweep("fedavg", out=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_sweep_without_a_folder_gets_a_new_one(tmp_path):
    cells = [Cell("a", "bpfed"), Cell("b", "some/file.toml"), Cell("c", "bpfed")]
    assert default_folder(cells, tmp_path) == tmp_path / "sweep-bpfed-file"
    (tmp_path / "sweep-bpfed-file").mkdir()
    assert default_folder(cells, tmp_path) == tmp_path / "sweep-bpfed-file-2"


def test_the_package_offers_it_without_importing_it():
    assert bflcore.sweep is sweeps.sweep
    assert "sweep" in bflcore.__all__
    assert next(iter(inspect.signature(bflcore.sweep).parameters)) == "methods"
