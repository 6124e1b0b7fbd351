"""The table of `bfl compare`."""

import re
from pathlib import Path

import attrs
import numpy as np
import pytest
import scipy.stats

from bflcore.errors import RunError
from bflcore.report import table
from bflcore.report.reading import Run
from bflcore.report.table import paired, print_table, row_of

ROW = {"run": "a", "method": "fedavg", "rounds": 3, "accuracy": 0.5, "std": None, "seconds": 1.25}


def test_a_table_has_one_complete_line_per_run_wherever_it_goes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    long = "a-run-with-a-name-" + "x" * 150
    print_table([ROW, ROW | {"run": long, "accuracy": 0.25, "std": None}])
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "method", "rounds", "accuracy", "seconds"]
    assert first.split() == ["a", "fedavg", "3", "0.5000", "1.2"]
    assert second.split() == [long, "fedavg", "3", "0.2500", "1.2"]
    assert len(head) == len(first) == len(second)


def test_columns_are_aligned_text_to_the_left_and_numbers_to_the_right(capsys):
    print_table([ROW, ROW | {"run": "longer", "rounds": 100}])
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.index("run") == first.index("a") == second.index("longer") == 0
    end = head.index("rounds") + len("rounds")
    assert first[:end].endswith(" 3")
    assert second[:end].endswith(" 100")


def test_names_are_not_read_as_markup(capsys):
    print_table([ROW | {"run": "[red]a[/red]"}])
    assert "[red]a[/red]" in capsys.readouterr().out


def test_a_value_that_one_run_lacks_is_a_dash(capsys):
    print_table([ROW | {"std": 0.1}, ROW])
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[4] == "0.1000"
    assert second.split()[4] == "-"


def test_validation_metrics_have_columns_of_their_own():
    final = {
        "personal.accuracy": {"mean": 0.5, "std": 0.1, "pooled": 0.4},
        "validation.accuracy": {"mean": 0.7, "std": 0.1, "pooled": 0.6},
        "validation.nll": {"mean": 0.9, "std": 0.1, "pooled": 0.8},
    }
    costs = {"seconds": {"total": 1.0}, "bytes": {"up": 0, "down": 0}}
    summary = {"method": "m", "rounds": 3, "final": final, **costs}
    row = row_of(Run(Path("a"), {}, [{"round": 3}], summary, {}, {}))
    assert (row["validation accuracy"], row["validation NLL"]) == (0.7, 0.9)


def finished(label, accuracies, final=None, marks="same"):
    """Return a finished run with the clients' accuracies at its last evaluation."""
    clients = [{"client": i, "accuracy": a} for i, a in enumerate(accuracies) if a is not None]
    costs = {"seconds": {"total": 1.0}, "bytes": {"up": 0, "down": 0}}
    summary = {"method": "m", "rounds": 3, "final": final or {}, **costs}
    environment = {"fingerprints": {"the data or its partition": marks}}
    evaluation = {"personal": {"clients": clients}}
    return Run(Path(label), {"rounds": 60}, [{"round": 3}], summary, evaluation, environment)


def test_all_columns_of_a_table_have_one_definition():
    names = ("accuracy", "balanced_accuracy", "f1", "auroc", "ece", "nll", "brier")
    final = {f"personal.{name}": {"mean": 0.25, "std": 0.5, "pooled": 0.75} for name in names}
    final |= {f"ood.{name}": final["personal.nll"] for name in ("auroc", "fpr95")}
    run = finished("a", [0.1, 0.4], final)
    for statistic, expected in (("mean", 0.25), ("pooled", 0.75)):
        row = row_of(run, statistic)
        shown = {k: v for k, v in row.items() if isinstance(v, float) and "MB" not in k}
        others = {"seconds": 1.0, "std over clients": 0.5, "worst": 0.1}
        assert {k: v for k, v in shown.items() if k not in others} == dict.fromkeys(
            (
                "accuracy",
                "balanced accuracy",
                "F1",
                "AUROC",
                "ECE",
                "NLL",
                "Brier",
                "OOD AUROC",
                "OOD FPR95",
            ),
            expected,
        )
        assert {k: v for k, v in shown.items() if k in others} == (
            others if statistic == "mean" else {}
        )


def test_the_worst_client_is_shown_with_its_name():
    run = finished("a", [0.9, 0.4, 0.6], {"personal.accuracy": dict.fromkeys(("mean", "std"), 0.5)})
    described = {"clients": [{"id": name, "train": 1, "test": 1} for name in ("x", "y", "z")]}
    row = row_of(attrs.evolve(run, description=described))
    assert (row["worst"], row["worst client"]) == (0.4, "y")


def test_runs_are_paired_client_by_client():
    mine, alone = [0.5, 0.7, None, 0.9, 0.6], [0.6, 0.7, 0.1, 0.5, None]
    found = paired(finished("a", mine), finished("alone", alone))
    differences = np.array([-0.1, 0.0, 0.4])
    assert (found["worse"], found["clients"]) == (1, 3)
    assert found["difference"] == pytest.approx(differences.mean())
    assert found["standard error"] == pytest.approx(scipy.stats.sem(differences))


def test_runs_on_other_data_are_not_paired():
    with pytest.raises(RunError, match="a and b cannot be compared client by client"):
        paired(finished("a", [0.5]), finished("b", [0.5], marks="other"))


def test_an_unfinished_run_says_how_far_it_is():
    row = row_of(attrs.evolve(finished("a", [0.5]), unfinished="round 3 of 60, unfinished"))
    assert row["rounds"] == "3 of 60"


def test_a_table_too_wide_for_the_terminal_is_turned(capsys, monkeypatch):
    rows = [
        {"run": f"r{i}", "method": "fedavg"} | {f"metric {j}": 0.5 for j in range(9)}
        for i in (0, 1)
    ]
    monkeypatch.setattr(table.Console, "is_terminal", True)
    for width, first in ((80, ["run", "r0", "r1"]), (200, ["run", "method", "metric"])):
        monkeypatch.setenv("COLUMNS", str(width))
        print_table(rows)
        out = re.sub("\x1b.*?m", "", capsys.readouterr().out)
        assert out.split()[:3] == first
        assert out.count("0.5000") == 18
        assert all(len(line) <= width for line in out.splitlines())


def test_a_loss_that_rounds_to_zero_has_no_sign(capsys):
    print_table([ROW | {"accuracy": -1e-17}])
    assert "-0.0" not in capsys.readouterr().out
