"""The report's table of coefficients, and the forest plot."""

from __future__ import annotations

from bflcore.experiments.coefficients import FILE, INTERCEPT, Coefficient
from bflcore.experiments.integrity import write_json
from bflcore.report.coefficients import forest, rows_of, section


def one(feature, mean, sd, output="yes", ratio=None, called=""):
    return Coefficient(feature, output, mean, sd, mean - 2 * sd, mean + 2 * sd, ratio, called)


def test_a_row_has_the_ratio_under_its_name_and_the_output_only_if_there_are_several():
    found = rows_of([one("age", 0.5, 0.1, ratio=1.6487, called="odds ratio")])
    assert list(found[0]) == ["coefficient", "mean", "sd", "lower", "upper", "odds ratio"]
    several = rows_of([one("age", 0.5, 0.1, "a"), one("age", -0.5, 0.1, "b")])
    assert [row["output"] for row in several] == ["a", "b"]


def test_the_picture_leaves_the_intercept_out_and_draws_every_interval():
    svg = forest([one(INTERCEPT, 90.0, 1.0), one("age", 0.5, 0.1), one("ward=$b", -0.2, 0.3)])
    assert "(intercept)" not in svg
    assert "age" in svg
    assert "ward=$b" in svg
    assert forest([one(INTERCEPT, 90.0, 1.0)]) == ""


def test_a_run_without_coefficients_has_no_section(tmp_path):
    assert section(tmp_path)["rows"] == []


def test_the_section_reads_the_stored_coefficients(tmp_path):
    row = {"feature": "age", "output": "yes", "mean": 0.5, "sd": 0.1}
    write_json(tmp_path / FILE, {"ratio": "", "coefficients": [row]})
    found = section(tmp_path)
    assert found["columns"] == ["coefficient", "mean", "sd", "lower", "upper"]
    assert found["rows"] == [["age", "0.5000", "0.1000", "0.3040", "0.6960"]]
    assert found["svg"].startswith("<svg")


def test_a_point_estimate_has_no_interval(tmp_path):
    row = {"feature": "age", "output": "yes", "mean": 0.5, "sd": None}
    write_json(tmp_path / FILE, {"ratio": "", "coefficients": [row]})
    assert section(tmp_path)["columns"] == ["coefficient", "mean"]
