"""The table of `bfl compare`."""

from pathlib import Path

from bflcore.report.reading import Run
from bflcore.report.table import print_table, row_of

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
    assert (row["validation accuracy"], row["validation NLL"]) == (0.7, 0.8)
