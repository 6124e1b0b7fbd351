import attrs
import pytest

from bflcore.studies.cells import Cell
from bflcore.studies.evidence import Measured
from bflcore.studies.outcome import Checked, Reproduction, compared
from bflcore.studies.paper_tables import Claim, read_table
from bflcore.studies.plan import Planned
from bflcore.studies.results import Trial
from bflcore.studies.results_page import facts, line, number, page, signed, spans


def reproduction(values, *, stand_in="", note="", failures=None):
    """Return FedSI's Table I with the values by seed of some rows of fashion-mnist-small."""
    table = read_table("fedsi.table1")
    column = table.column("fashion-mnist-small")
    cells = []
    for row in table.rows:
        noted = attrs.evolve(row, notes={column.name: note} if note else {})
        cell = Cell(f"{row.name}_x", row.recipe.method, {"rounds": 30})
        why = "mnist is not here" if stand_in else ""
        planned = Planned(noted, column, cell, 30, stand_in, why=why)
        cells.append(compared(planned, values.get(row.name, {}), (0, 1), 89.68))
    why = "cifar10 is not here; get it with: bfl reproduce fedsi.table1 --only x --download"
    cells.append(
        compared(Planned(table.rows[0], table.column("cifar10-small"), why=why), {}, (0, 1), None)
    )
    command = "bfl reproduce fedsi.table1"
    return Reproduction(table, tuple(cells), (), (), failures or {}, command, command)


def rows_of(text, first):
    return [row for row in text.splitlines() if row.startswith(f"| {first} |")]


def test_the_page_shows_paper_ours_and_their_difference():
    text = page(reproduction({"fedsi": {0: 0.88, 1: 0.89}}))
    assert rows_of(text, "fedsi") == [
        "| fedsi | 88.41 | 89.68 | 88.50 ± 0.71 | +0.09 | 0, 1 | 30 |"
    ]
    assert rows_of(text, "fedavg") == ["| fedavg | 81.28 | 89.68 | not run |  |  |  |"]


def test_exceptions_come_first_with_their_reasons_the_worst_at_the_top():
    found = reproduction({"fedsi": {0: 0.80}, "local": {0: 0.84}}, note="30 of 800 rounds")
    text = page(found)
    listed = [row for row in text.splitlines() if row.startswith("* **")]
    assert [row.split("**")[1] for row in listed] == [
        "fedsi, fashion-mnist-small",
        "local, fashion-mnist-small",
    ]
    assert "80.00 against 88.41 (-8.41). 30 of 800 rounds." in listed[0]
    assert text.index("## Exceptions") < text.index("## fashion-mnist-small")


def test_an_exception_without_a_reason_says_so():
    text = page(reproduction({"fedsi": {0: 0.80}}))
    assert "(-8.41). The reason is not known." in text


def test_an_exception_is_told_against_the_nearer_paper():
    text = page(reproduction({"local": {0: 0.8810}}))  # the papers have 86.51 and 89.68
    assert "88.10 against 89.68 (-1.58)" in text
    assert rows_of(text, "local") == ["| local | 86.51 | 89.68 | 88.10 | +1.59 | 0 | 30 |"]


def test_a_page_without_exceptions_says_so():
    text = page(reproduction({"fedsi": {0: 0.90}}))
    assert "No cell that was run is worse than the nearer paper's by more than 1." in text


def test_stand_in_data_are_named_beside_the_numbers_and_among_the_reasons():
    text = page(reproduction({"fedsi": {0: 0.5}}, stand_in="mnist5k, a part"))
    assert "Not the paper's data, but mnist5k, a part (mnist is not here)." in text
    assert "(-38.41). Not the paper's data: mnist5k, a part." in text


def test_what_was_not_run_says_which_command_runs_or_fetches_it():
    found = reproduction({"fedsi": {0: 0.9}}, failures={"bfl run fedper": "out of memory"})
    text = page(found)
    assert "* cifar10-small: cifar10 is not here; get it with: bfl reproduce" in text
    assert "`bfl reproduce fedsi.table1 --only fashion-mnist-small`" in text
    assert "* failed: `bfl run fedper`: out of memory" in text


def test_a_table_that_was_not_run_has_no_sections_of_numbers():
    text = page(reproduction({}))
    assert "## Exceptions" not in text
    assert "## Settings" not in text
    assert "## What was not run" in text


def test_claims_show_difference_interval_and_verdict():
    claim = Claim("a is better", "fashion-mnist-small", ("fedsi",), ("local",))
    found = attrs.evolve(
        reproduction({}), claims=(Checked(claim, 1.234, 0.5, 3, "seen"), Checked(claim))
    )
    text = page(found)
    assert "| a is better | +1.23 ± 0.50 | 3 | seen |" in text
    assert "| a is better |  |  | not run |" in text
    assert facts(found)["claims"][0]["verdict"] == "seen"


def test_facts_hold_the_same_numbers():
    found = facts(reproduction({"fedsi": {0: 0.88, 1: 0.89}}))
    one = next(c for c in found["cells"] if c["row"] == "fedsi")
    assert one["mean"] == pytest.approx(88.5)
    assert one["difference"] == pytest.approx(0.09)
    assert one["seeds"] == [0, 1]
    assert "not here" in next(c for c in found["cells"] if c["column"] == "cifar10-small")


def test_pieces_of_a_page():
    assert (number(1.005, 1), number(None, 1, "n/a")) == ("1.0", "n/a")
    assert (signed(0.05, 2), signed(-0.05, 2), signed(None, 2)) == ("+0.05", "-0.05", "")
    assert (spans([0, 1, 2]), spans([0, 2]), spans([3]), spans([])) == ("0-2", "0, 2", "3", "")
    assert line("a", "b") == "| a | b |"


def test_runs_are_named_with_their_machines_and_versions():
    installed = {"bflcore": "2", "bfl-a": "2", "bfl-b": "2", "bfl-own": "1"}
    versions = {"python": "3.11", "torch": "2.9", "distributions": installed}
    trial = Trial("a", 0, "bfl run", seconds=60.0)
    new = Measured(trial, versions, {"processor": "P", "cores": 2}, "digest")
    old = Measured(trial, {"python": "3.11", "torch": "2.9"}, {})
    text = page(attrs.evolve(reproduction({}), runs=(new, old), kept=1))
    assert "2 runs of 2 minutes in all (P, 2 cores; Python 3.11, torch 2.9" in text
    assert "bflcore and 2 plugins 2, bfl-own 1; a machine that was not recorded; Pyth" in text
    assert "For 1 of them the record has the command alone" in text
    assert "1 run of other settings is kept in `fedsi.table1.json`." in text


def test_cells_that_only_the_other_paper_prints_count_among_those_that_were_run():
    found = reproduction({"fedsi": {0: 0.80}})
    printed = [attrs.evolve(one, paper=None) for one in found.cells]
    text = page(attrs.evolve(found, cells=tuple(printed)))
    assert "1 of the 1 cells that were run are worse than the (nearer) paper's" in text
    assert "80.00 against 89.68 (-9.68)" in text


def test_data_of_another_kind_have_neither_difference_nor_exception():
    found = reproduction({"fedsi": {0: 0.5}}, stand_in="digits")
    cells = [
        attrs.evolve(one, planned=attrs.evolve(one.planned, comparable=False))
        for one in found.cells
    ]
    text = page(attrs.evolve(found, cells=tuple(cells)))
    assert "## Exceptions" not in text
    assert rows_of(text, "fedsi") == ["| fedsi | 88.41 | 89.68 | 50.00 |  | 0 | 30 |"]
    assert "Nothing is compared with the printed numbers." in text
