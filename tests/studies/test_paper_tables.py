import tomllib
from pathlib import Path

import pytest

from bflcore.errors import OptionError
from bflcore.registry.loading import load_registry
from bflcore.studies import plan as planning
from bflcore.studies.cells import seeds_of
from bflcore.studies.execution import resolve_cells
from bflcore.studies.paper_tables import matches, read_table, table_names

ROOT = Path(__file__).parents[2]
REGISTRY = load_registry()
NEEDED = {
    *("bpfed.table1", "bpfed.table2", "fedsi.table1", "fedsi.table2", "superfed.table1"),
    *("superfed.table2", "superfed.table3", "superfed.table4", "superfed.table5"),
    *("aggregation.table1", "aggregation.tables", "tdamp.figures", "fedsi.figures"),
    "bpfed.figures",
}
TINY = """
title = "Tiny"
source = "nobody, Table 0"
seeds = "0-1"
rounds = { paper = 9, here = 1 }
flags = { clients = 3, local_epochs = 1 }

[settings.digits]
flags = { data = "digits" }

[recipes.fedavg]
method = "fedavg"

[metrics.accuracy]
key = "personal.accuracy"
title = "accuracy, %"

[[columns]]
name = "digits"

[[rows]]
name = "fedavg"
paper = [50.0]
"""


def written(tmp_path, text=TINY):
    path = tmp_path / "tiny.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_table_that_the_papers_print_is_there():
    assert set(table_names()) == NEEDED


@pytest.mark.parametrize("name", table_names())
@pytest.mark.parametrize("absent", [False, True], ids=["all data here", "no data here"])
def test_every_cell_of_every_table_is_a_valid_run(name, absent, monkeypatch):
    monkeypatch.setattr(
        planning, "missing", lambda data, folder=None: f"{data} is not here" if absent else ""
    )
    table = read_table(name)
    for paper in (False, True):
        planned = planning.plan(table, paper=paper)
        cells = {one.cell.name: one.cell for one in planned if one.cell}
        if cells:
            resolve_cells(list(cells.values()))
        assert absent or len(planned) == sum(one.cell is not None for one in planned)
        assert all(one.why for one in planned if one.cell is None)
    assert len(seeds_of(table.protocol.seeds)) >= 3


@pytest.mark.parametrize("name", table_names())
def test_a_cell_has_one_name_per_setting(name, monkeypatch):
    monkeypatch.setattr(planning, "missing", lambda data, folder=None: "")
    found = {}
    for one in planning.plan(read_table(name)):
        settings = (one.cell.method, dict(one.cell.flags), dict(one.cell.options))
        assert found.setdefault(one.cell.name, settings) == settings


@pytest.mark.parametrize("name", table_names())
def test_printed_numbers_are_within_the_range_of_their_metric(name):
    table = read_table(name)
    for row in table.rows:
        for column, number in row.paper.items():
            low, high = table.column(column).metric.range
            assert number is None or low <= number <= high, (row.name, column)


@pytest.mark.parametrize("name", table_names())
def test_metrics_methods_and_reasons_of_a_table_exist(name):
    table = read_table(name)
    assert {row.recipe.method for row in table.rows} <= set(REGISTRY.methods)
    columns = {column.name for column in table.columns}
    for row in table.rows:
        assert set(row.notes) <= {*columns, "*"}, row.name
    for column in table.columns:
        assert column.metric.key.startswith(("personal.", "global.", "novel."))
        assert column.metric.statistic in {"mean", "std", "pooled"}
        assert column.metric.better in {"higher", "lower", "neither"}
    assert table.against in {"", *table_names()}
    for claim in table.claims:
        better = {table.column(c).metric.better for c in (claim.column, claim.than_column)}
        assert len(better) == 1
        cells = {(row.name, column.name) for row, column in table.cells()}
        assert {(row, claim.column) for row in claim.rows} <= cells, claim.text
        others = {(row, claim.than_column) for row in claim.than_rows or claim.rows}
        assert others <= cells, claim.text


@pytest.mark.parametrize("name", [n for n in table_names() if n.endswith(".figures")])
def test_curves_without_printed_numbers_have_claims(name):
    table = read_table(name)
    assert not any(number for row in table.rows for number in row.paper.values())
    assert table.claims


def test_every_file_of_the_tables_is_packaged():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["bflcore"]
    packaged = {path for pattern in patterns for path in (ROOT / "bflcore").glob(pattern)}
    assert set((ROOT / "bflcore/studies").rglob("*.toml")) <= packaged


def test_known_numbers_of_the_papers():
    fedsi = read_table("fedsi.table1")
    assert fedsi.row("fedsi").paper["fashion-mnist-small"] == 88.41
    assert read_table("bpfed.table1").row("fedsoul").paper["cifar10-large"] == 62.70
    noise = read_table("superfed.table4").row("superfed-lm").paper
    assert (noise["mnist-pair ECE"], noise["cifar10-symmetric accuracy"]) == (0.14, 54.69)
    spread = read_table("superfed.table1").row("pfedme").paper
    assert (spread["mnist-50"], spread["mnist-50 std"]) == (81.10, 8.52)
    assert spread["fashion-mnist-50"] is None


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("fedsi", {"fedsi"}),
        ("fashion-mnist", {"fashion-mnist-small", "fashion-mnist-large"}),
        ("mnist", {"mnist-small"}),
        ("*-small", {"fashion-mnist-small", "mnist-small"}),
        ("fedsi*", {"fedsi", "fedsi-fac"}),
        ("fed", set()),
        ("mnist-small", {"mnist-small", "mnist-small ECE"} - {"mnist-small ECE"}),
    ],
)
def test_a_pattern_selects_a_name_a_glob_or_the_beginning(pattern, selected):
    names = ["fedsi", "fedsi-fac", "mnist-small", "fashion-mnist-small", "fashion-mnist-large"]
    assert matches(pattern, names) == selected


def test_the_columns_of_several_metrics_share_a_beginning():
    assert matches("iid", ["iid", "iid ECE"]) == {"iid"}
    assert matches("cifar10-pair", ["cifar10-pair ECE", "cifar10-pair MCE"]) == {
        "cifar10-pair ECE",
        "cifar10-pair MCE",
    }


def test_patterns_of_rows_and_of_columns_select_cells_together():
    table = read_table("fedsi.table1")
    cells = [(row.name, column.name) for row, column in table.cells(["fedsi", "fashion-mnist"])]
    assert cells == [("fedsi", "fashion-mnist-small"), ("fedsi", "fashion-mnist-large")]
    rows = {row.name for row, _ in table.cells(["mnist-small"])}
    assert rows == {row.name for row in table.rows}


def test_an_unknown_pattern_is_refused_with_the_nearest_name():
    with pytest.raises(OptionError, match="unknown row or column in --only 'fedsj'.*fedsi"):
        read_table("fedsi.table1").cells(["fedsj"])


def test_an_unknown_table_is_refused_with_the_nearest_name():
    with pytest.raises(OptionError, match=r"unknown table 'fedsi.tabel1'.*fedsi.table1.*\.toml"):
        read_table("fedsi.tabel1")


def test_a_table_may_be_a_file(tmp_path):
    table = read_table(written(tmp_path))
    assert (table.name, table.protocol.rounds.paper) == ("tiny", 9)
    assert table.row("fedavg").paper == {"digits": 50.0}


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('title = "Tiny"', "title =", "cannot be read as TOML"),
        ('source = "nobody, Table 0"', "", "lacks the key source"),
        ('seeds = "0-1"', 'seed = "0-1"', "unknown key of .*tiny.toml 'seed' .did you mean seeds"),
        ('method = "fedavg"', 'methd = "fedavg"', "unknown key of a recipe.*did you mean method"),
        ("paper = [50.0]", "paper = [50.0, 1]", "2 numbers for 1 columns"),
        ("paper = [50.0]", 'paper = ["50"]', "row fedavg, column digits: '50' is not allowed"),
        ("paper = [50.0]", 'recipe = "fedovg"', "unknown recipe of row fedavg.*fedavg"),
        ('name = "digits"', 'name = "digit"', "unknown setting of column digit.*digits"),
        ("[[rows]]", '[[claims]]\ntext = ""\ncolumn = "x"\nrows = []\n[[rows]]', "column of a cl"),
        ("rounds = { paper = 9, here = 1 }", "rounds = { paper = 9 }", "lacks the key here"),
        (
            "rounds = { paper = 9, here = 1 }",
            "rounds = 3",
            "rounds: 3 is not allowed; allowed: a t",
        ),
        ("here = 1", "here = true", "here: True is not allowed; allowed: a whole number"),
        ('seeds = "0-1"', "seeds = [0, 1]", r"seeds: \[0, 1\] is not allowed; allowed: text"),
        ("[metrics.accuracy]", "[[metrics]]", r"write \[metrics.NAME\]"),
        ("[[rows]]", "[rows]", r"write \[\[rows\]\]"),
        (
            'key = "personal.',
            'better = "Lower"\nkey = "personal.',
            "'Lower' is not.*lower, neither",
        ),
        ('key = "personal.', 'range = [0]\nkey = "personal.', "allowed: a list of 2 times a numb"),
        (
            "paper = [50.0]",
            'columns = "digits"',
            "columns: 'digits' is not allowed; .*list of text",
        ),
        ("paper = [50.0]", "paper = 50.0", "row fedavg has 50.0 for 1 columns"),
        ("paper = [50.0]", "recipe = [1]", "unknown recipe of row fedavg"),
        ('data = "digits" }', 'data = "digits" }\nstand_in = "x"', "stand_in: 'x' is not allowed"),
    ],
)
def test_a_file_that_is_not_a_table_is_refused_in_one_line(tmp_path, old, new, error):
    assert old in TINY
    with pytest.raises(OptionError, match=error) as caught:
        read_table(written(tmp_path, TINY.replace(old, new, 1)))
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(OptionError, match="does not exist"):
        read_table(tmp_path / "none.toml")
