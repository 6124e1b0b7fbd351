"""The small pictures of clients over rounds."""

from pathlib import Path

import attrs
import pytest

from bflcore.report.history import HEIGHT, SHOWN, WIDTH, section
from bflcore.report.reading import Run


def run_of(label, lines, name="accuracy", mark="same"):
    """Return a run in which client i has the values `lines[i]` by round."""
    count = max(map(len, lines.values()))
    records = []
    for i in range(count):
        known = {client: values[i] for client, values in lines.items() if i < len(values)}
        columns = {"client": [*known], name: [*known.values()]}
        mean = sum(v for v in known.values() if v) / len(known)
        records.append({"round": 2 * i + 1, "by_client": columns})
        records[-1][f"personal.{name}"] = {"mean": mean}
    prints = {"fingerprints": {"the data or its partition": mark}}
    return Run(Path(label), {}, records, {}, {}, prints)


def points(text):
    return [tuple(map(float, pair.split(","))) for pair in text.split()]


def test_each_client_has_a_panel_and_the_worst_comes_first():
    found = section([run_of("a", {0: [0.5, 0.9], 1: [0.5, 0.6], 2: [0.7, 0.8]})], ["red"])
    assert [(p["client"], p["pictures"][0]["last"]) for p in found["panels"]] == [
        ("1", "0.600"),
        ("2", "0.800"),
        ("0", "0.900"),
    ]
    (scale,) = found["metrics"]
    assert (scale["low"], scale["high"], found["first"], found["final"]) == ("0.5", "1", 1, 3)
    (picture,) = found["panels"][2]["pictures"]
    (line,) = picture["lines"]
    assert line["colour"] == "red"
    assert points(line["points"]) == [
        (0, HEIGHT),
        (WIDTH, pytest.approx(0.2 * HEIGHT, abs=0.06)),
    ]
    ends = points(picture["mean"])
    assert ends[1][1] == pytest.approx(HEIGHT * (1 - (2.3 / 3 - 0.5) / 0.5), abs=0.06)


def test_a_regression_begins_with_the_largest_error():
    run = run_of("a", {0: [3.0, 1.0], 1: [2.0, 1.5]}, "rmse")
    run.records[0]["personal.rmse"] = run.records[0].get("personal.rmse", {"mean": 1})
    found = section([run], ["red"])
    assert [panel["client"] for panel in found["panels"]] == ["1", "0"]
    assert found["metrics"][0]["name"] == "RMSE"


def test_runs_on_the_same_clients_share_panels_and_others_are_named():
    one, two = (run_of(n, {0: [0.5, 0.9], 1: [0.4, 0.7]}) for n in "ab")
    other = run_of("c", {0: [0.1, 0.2]}, mark="other")
    found = section([one, two, other], ["red", "green", "blue"])
    drawn = [panel["pictures"][0] for panel in found["panels"]]
    assert [[line["colour"] for line in one["lines"]] for one in drawn] == [["red", "green"]] * 2
    assert [one["mean"] for one in drawn] == ["", ""]
    assert "of a in its last round" in found["sentences"][0]
    assert found["sentences"][-1].endswith("divided otherwise: c.")


def test_of_many_clients_some_are_shown_from_the_worst_to_the_best():
    lines = {i: [0.1, i / 100] for i in range(100)}
    found = section([run_of("a", lines)], ["red"])
    shown = [int(panel["client"]) for panel in found["panels"]]
    assert len(shown) == SHOWN
    assert (shown[0], shown[-1]) == (0, 99)
    assert sorted(shown) == shown
    assert f"{SHOWN} of 100 clients" in found["sentences"][1]


def test_without_recorded_clients_or_with_a_single_evaluation_there_is_no_section():
    assert section([run_of("a", {0: [0.5]})], ["red"])["panels"] == []
    bare = attrs.evolve(run_of("a", {0: [0.5, 0.6]}), records=[{"round": 1}, {"round": 2}])
    assert section([bare], ["red"])["panels"] == []


def test_a_value_that_is_missing_or_not_finite_leaves_a_gap():
    found = section([run_of("a", {0: [0.5, None, float("nan"), 0.9]})], ["red"])
    assert len(points(found["panels"][0]["pictures"][0]["lines"][0]["points"])) == 2


def test_the_nll_of_each_client_is_drawn_on_a_scale_of_its_own():
    run = run_of("a", {0: [0.5, 0.6], 1: [0.5, 0.9]})
    for record, values in zip(run.records, ([2.0, 2.0], [4.0, 1.0]), strict=True):
        record["by_client"]["nll"] = values
        record["personal.nll"] = {"mean": sum(values) / 2}
    found = section([run], ["red"])
    assert [(m["name"], m["low"], m["high"]) for m in found["metrics"]] == [
        ("accuracy", "0.5", "1"),
        ("NLL", "1", "4"),
    ]
    worst = found["panels"][0]["pictures"][1]  # the client of the lowest accuracy is overconfident
    assert (worst["metric"], worst["last"]) == ("NLL", "4.000")
    assert points(worst["lines"][0]["points"]) == [
        (0, pytest.approx(HEIGHT * 2 / 3, abs=0.06)),
        (WIDTH, 0),
    ]
    assert points(worst["mean"])[1][1] == pytest.approx(HEIGHT / 2, abs=0.06)
