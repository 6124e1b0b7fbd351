"""Tables of studies hold their numbers in every format."""

import csv
import io

import pytest

from bflcore import OptionError
from bflcore.studies.tables import (
    FORMATS,
    comparison_rows,
    csv_text,
    formatted,
    overview,
    result_rows,
)

from .quick import results

FOUND = results({"a_1": [0.5, 0.7], "b": [0.9, 0.8]}, b={"lr": "0.1"})


def test_an_overview_has_mean_and_deviation_over_seeds():
    assert overview(FOUND) == [
        {"cell": "a_1", "n": 2, "personal.accuracy": "0.6000 ± 0.1414"},
        {"cell": "b", "n": 2, "personal.accuracy": "0.8500 ± 0.0707"},
    ]
    one = results({"a": [0.5], "b": []})
    assert [row["personal.accuracy"] for row in overview(one)] == ["0.5000", None]


def test_unrounded_rows_have_every_axis_and_metric():
    first, second = result_rows(FOUND)
    assert (first["lr"], second["lr"], second["n"]) == (None, "0.1", 2)
    assert second["personal.accuracy mean"] == pytest.approx(0.85)
    assert second["personal.accuracy sd"] == pytest.approx(0.005**0.5)


def test_csv_is_read_back():
    rows = comparison_rows(FOUND.compare(), rounded=False)
    read = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert [row["verdict"] for row in read] == ["baseline", "not distinguishable"]
    assert float(read[1]["difference"]) == pytest.approx(0.25)
    assert read[0]["difference"] == ""


def test_each_format_has_every_row_and_the_note():
    rows = comparison_rows(FOUND.compare())
    for form in FORMATS:
        text = formatted(rows, form, "A note.")
        assert ("A note." in text) == (form != "csv")
        assert text.count("not distinguishable") == 1
        assert "+0.2500" in text
    latex = formatted(rows, "latex")
    assert " & $+0.2500$ & " in latex
    assert r"a\_1" in latex
    assert latex.splitlines()[0] == r"\begin{tabular}{llrrrrrrrrl}"
    assert formatted(overview(FOUND), "latex").count(r"$\pm$") == 2
    assert formatted(rows, "markdown").startswith("| metric | cell | n |")
    with pytest.raises(OptionError, match="unknown format 'pdf'; allowed: csv, latex, markdown"):
        formatted(rows, "pdf")


def test_what_steers_a_table_is_escaped():
    row = {"cell": "a|b&c_%", "n": 1, "empty": None}
    assert "$<$ 0.001" in formatted([{"p": "< 0.001"}], "latex")
    assert formatted([row], "markdown").splitlines()[2] == r"| a\|b&c_% | 1 |"
    assert r"a|b\&c\_\% & 1 \\" in formatted([row], "latex")
