"""The pictures of groups of runs: what is drawn of seeds, of a few groups, and of many."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from bflcore.report.comparison import by_settings
from bflcore.report.group_plots import (
    DRAWN,
    OVERLAID,
    intervals,
    learning_curves,
    reliability,
    retention,
)
from bflcore.report.plots import COLOURS, GREY
from bflcore.report.reading import Run

from .drawn import bands, metric, parse, paths, run_of, texts

PICTURES = (learning_curves, reliability, retention)


def drawn(draw, *runs):
    """Return the root of a picture of runs."""
    return parse(draw(by_settings(runs)))


def seeds(label, *shifts, **settings):
    """Return runs that differ in the seed alone, their metrics moved by `shifts`."""
    runs = [run_of(f"{label}-{s}", method=label, seed=s, **settings) for s in range(len(shifts))]
    for run, shift in zip(runs, shifts, strict=True):
        for record in run.records:
            for name in [*record][1:]:
                record[name] = metric(record[name]["mean"] + shift)
    return runs


def test_learning_curves_draw_every_model_and_metric_of_a_group():
    root = drawn(learning_curves, run_of("one"))
    lines = paths(root, COLOURS[0])
    assert [len(line) for line in lines] == [4] * 6  # three metrics of two models, four rounds
    for line in lines:
        assert np.allclose(np.diff(line[:, 0]), np.diff(line[:, 0])[0])  # rounds are equidistant
        assert (np.diff(line[:, 1]) < 0).all()  # SVG counts downwards: the values rise
    shown = texts(root)
    assert shown.count("round") == 3
    assert {"accuracy", "NLL (nats)", "ECE"} <= set(shown)


def test_learning_curves_of_several_groups_have_a_row_per_model():
    runs = [run_of("one"), run_of("two", rounds=3, groups=("personal",))]
    root = drawn(learning_curves, *runs)
    first, second = (paths(root, colour) for colour in COLOURS[:2])
    assert [len(line) for line in first] == [4] * 6
    assert [len(line) for line in second] == [3] * 3
    shown = texts(root)
    assert shown.count("round") == 6
    assert {"each client's own model", "the server's model"} <= set(shown)
    assert not {"one", "two"} & set(shown)  # the page's legend names runs, and hides no curve


def test_learning_curves_of_regressions_draw_their_metrics():
    root = drawn(learning_curves, run_of("one", task="regression"))
    assert {"RMSE", "NLL (nats)", "coverage90"} <= set(texts(root))
    assert len(paths(root, COLOURS[0])) == 6


def test_the_servers_model_is_dashed_in_the_picture_of_one_group():
    text = learning_curves(by_settings([run_of("one")]))
    styles = [s for s in re.findall(r'style="([^"]*)"', text) if "stroke: #0072b2" in s]
    dashed = [style for style in styles if "stroke-dasharray" in style]
    assert len(styles) == 2 * len(dashed)
    assert len(dashed) == 3  # each metric


def test_seeds_are_one_line_through_their_mean_in_a_band_from_the_lowest_to_the_highest():
    three = seeds("one", 0.0, 0.1, 0.5, groups=("personal",))
    del three[2].records[3]  # it has a round less: of that, there is no mean
    root = drawn(learning_curves, *three)
    lines = paths(root, COLOURS[0])
    assert [len(line) for line in lines] == [3] * 3
    assert len(bands(root)) == 3
    for line, band in zip(lines, bands(root), strict=True):
        for x, y in line:
            ends = band[np.isclose(band[:, 0], x, atol=0.01), 1]
            # SVG counts downwards: the mean, 0.2, lies two fifths above the lowest.
            assert (ends.max() - y) / np.ptp(ends) == pytest.approx(0.4, abs=1e-3)
    assert not bands(drawn(learning_curves, three[0]))


def test_more_groups_than_colours_are_told_apart_by_dashes():
    runs = [run_of(f"run{i}", rounds=2, method=str(i)) for i in range(OVERLAID + 1)]
    text = learning_curves(by_settings(runs))
    parse(text)
    styles = [s for s in re.findall(r'style="([^"]*)"', text) if "stroke: #0072b2" in s]
    assert [("stroke-dasharray" in style) for style in styles] == [False, True] * 6


def test_lines_of_many_rounds_and_groups_are_thinned_to_both_ends():
    runs = [run_of(f"run{i}", rounds=200, method=str(i)) for i in range(12)]
    for run in runs:
        for record in run.records:  # a zigzag, of which no point can be left out
            record["personal.accuracy"] = metric(record["round"] ** 2 % 7)
    lines = paths(drawn(learning_curves, *runs), COLOURS[0])
    whole = paths(drawn(learning_curves, *runs[:2]), COLOURS[0])
    assert max(map(len, lines)) <= DRAWN // 12 < max(map(len, whole))
    assert np.allclose(lines[0][[0, -1], 0], whole[0][[0, -1], 0], atol=0.5)


def test_a_value_that_is_not_a_number_leaves_a_gap():
    run = run_of("one")
    run.records[1]["personal.nll"] = metric(float("nan"))
    root = drawn(learning_curves, run)
    assert sorted(len(line) for line in paths(root, COLOURS[0])) == [3, 4, 4, 4, 4, 4]


def test_curves_are_means_over_clients():
    run = run_of("one")
    for record in run.records:
        for value in record.values():
            if isinstance(value, dict):
                value["pooled"] = float("nan")  # would leave nothing to draw
    assert [len(line) for line in paths(drawn(learning_curves, run), COLOURS[0])] == [4] * 6


def test_a_reliability_diagram_draws_the_filled_bins_beside_the_diagonal():
    root = drawn(reliability, run_of("one"), run_of("two"))
    (diagonal,) = (line for line in paths(root, GREY) if np.ptp(line[:, 0]) > 100)
    for colour in COLOURS[:2]:
        (line,) = (line for line in paths(root, colour) if len(line) > 1)
        assert len(line) == 3  # bins without samples are left out
        # A calibrated model lies on the diagonal, through its two ends.
        (x0, y0), (x1, y1) = diagonal
        assert np.allclose(line[:, 1], y0 + (y1 - y0) * (line[:, 0] - x0) / (x1 - x0), atol=0.01)
    assert texts(root).count("confidence") == 3  # two axes, one title
    assert {"accuracy", "share of samples"} <= {*texts(root)}


def test_a_reliability_diagram_pools_the_bins_of_seeds():
    runs = seeds("one", 0, 0)
    bins = {"confidence": [0.5, 0.5], "accuracy": [0.2, 0.8]}
    for run, counts in zip(runs, ([1, 1], [3, 1]), strict=True):
        run.evaluation["personal"]["reliability"] = bins | {"count": counts}
    runs[1].evaluation["personal"]["reliability"] = bins | {"accuracy": [0.6, 0.8], "count": [3, 1]}
    root = drawn(reliability, *runs)
    (line,) = (line for line in paths(root, COLOURS[0]) if len(line) == 2)
    (diagonal,) = (line for line in paths(root, GREY) if np.ptp(line[:, 0]) > 100)
    heights = (line[:, 1] - diagonal[0, 1]) / (diagonal[1, 1] - diagonal[0, 1])
    assert heights == pytest.approx([(0.2 + 3 * 0.6) / 4, 0.8], abs=1e-3)
    assert len(bands(root)) == 1


def test_of_many_groups_reliability_is_a_point_each():
    runs = [run_of(f"run{i}", method=str(i)) for i in range(OVERLAID + 1)]
    sure = {"count": [1, 3], "confidence": [0.5, 0.9], "accuracy": [0.6, 0.7]}
    runs[0].evaluation["personal"]["reliability"] = sure
    root = drawn(reliability, *runs)
    assert {"ECE", "confidence \N{MINUS SIGN} accuracy"} <= set(texts(root))
    assert {f"run{i}" for i in range(OVERLAID + 1)} <= set(texts(root))
    bars = [line[0, 0] for line in paths(root, COLOURS[0], "LineCollection") if len(line) == 2]
    (zero,) = (line[0, 0] for line in paths(root, GREY) if np.ptp(line[:, 1]) > 50)
    error, *others = bars[: OVERLAID + 1]
    excess, *calibrated = bars[OVERLAID + 1 :]
    assert len({*others}) == len({*calibrated}) == 1
    assert calibrated[0] == pytest.approx(zero)
    # The error is 0.25 * 0.1 + 0.75 * 0.2, the excess 0.75 * 0.2 - 0.25 * 0.1; scales differ.
    assert error > others[0]
    assert excess > zero


def test_a_retention_curve_draws_its_points():
    line, risk, ideal = paths(drawn(retention, run_of("one")), COLOURS[0])
    assert len(line) == len(risk) == len(ideal) == 100
    assert (np.diff(risk[:, 1]) < 1e-6).all()  # SVG counts downwards: the error rises
    assert (ideal[:, 1] >= risk[:, 1] - 1e-6).all()
    assert (np.diff(line[:, 1]) > -1e-6).all()  # less accurate, the more samples are kept
    height = line[-1, 1] - line[0, 1]  # from 1.0 at a quarter of the samples to 0.8 at all
    assert (line[49, 1] - line[0, 1]) / height == pytest.approx(0.5, abs=1e-3)  # 0.9 at a half
    # Between two points errors are spread evenly: 0.05 of the samples at a half, 0.2 at all.
    assert (line[74, 1] - line[0, 1]) / height == pytest.approx(0.125 / 0.75 / 0.2, abs=1e-3)


def test_seeds_of_a_retention_curve_are_a_mean_in_a_band_and_many_groups_have_no_ideal():
    assert len(bands(drawn(retention, *seeds("one", 0, 0)))) == 2
    many = [run_of(f"run{i}", method=str(i)) for i in range(OVERLAID + 1)]
    assert len(paths(drawn(retention, *many))) == 2 * (OVERLAID + 1)


def regression(label, *clients, **experiment):
    """Return a run whose clients' intervals of 50, 90 and 95 % cover these shares."""
    run = run_of(label, task="regression", **experiment)
    names = ("coverage50", "coverage90", "coverage95")
    personal = {"clients": [dict(zip(names, shares, strict=True)) for shares in clients]}
    run.evaluation["personal"] = personal
    return run


def test_intervals_of_a_run_are_drawn_for_each_client_and_their_mean_beside_the_diagonal():
    root = drawn(intervals, regression("one", (0.4, 0.9, 0.95), (0.6, 0.9, 0.95)))
    diagonal, *clients = (line for line in paths(root, GREY) if np.ptp(line[:, 0]) > 50)
    assert [len(line) for line in clients] == [3, 3]
    (average,) = (line for line in paths(root, COLOURS[0]) if len(line) == 3)
    (x0, y0), (x1, y1) = diagonal
    assert np.allclose(average[:, 1], y0 + (y1 - y0) * (average[:, 0] - x0) / (x1 - x0), atol=0.01)
    assert "nominal coverage (%)" in texts(root)


def test_intervals_of_groups_are_lines_and_of_many_groups_points():
    two = [regression("one", (0.4, 0.8, 0.9), method="a", seed=s) for s in range(2)]
    root = drawn(intervals, *two, regression("two", (0.5, 0.9, 0.9), method="b"))
    assert [len(line) for line in paths(root, COLOURS[1]) if len(line) > 1] == [3]
    assert len(bands(root)) == 1
    many = [regression(f"run{i}", (0.4, 0.8, 0.9), method=str(i)) for i in range(OVERLAID + 1)]
    root = drawn(intervals, *many)
    assert {"run0", f"run{OVERLAID}", "coverage of 95 % intervals"} <= set(texts(root))


@pytest.mark.parametrize("draw", PICTURES)
def test_a_run_without_evaluated_clients_leaves_pictures_empty(draw):
    empty = Run(Path("none"), {}, [{"round": 1}], {}, {}, {})
    assert not paths(drawn(draw, empty), COLOURS[0])
    many = [Run(Path(f"{i}"), {"method": i}, [{"round": 1}], {}, {}, {}) for i in range(9)]
    assert not paths(drawn(draw, *many), COLOURS[0])


@pytest.mark.parametrize("draw", [reliability, retention])
def test_a_run_has_one_colour_in_all_pictures(draw):
    runs = [run_of("one"), run_of("two")]
    del runs[0].evaluation["personal"]
    root = drawn(draw, *runs)
    assert not paths(root, COLOURS[0])
    assert paths(root, COLOURS[1])


@pytest.mark.parametrize("draw", PICTURES)
def test_the_same_runs_give_the_same_picture(draw):
    assert draw(by_settings([run_of("one")])) == draw(by_settings([run_of("one")]))
