"""What the pictures show, read from their SVG."""

from __future__ import annotations

import warnings

import attrs
import numpy as np
import pytest

from bflcore.report import plots
from bflcore.report.landscape import Plane

from .drawn import SVG, parse, paths, run_of, texts


def test_curves_along_an_axis_draw_the_mean_and_every_client():
    values = [0.0, 0.5, 1.0]
    columns = {"accuracy": [0.1, 0.2, 0.3], "nll": [3.0, 2.0, 1.0]}
    clients = [{"client": number} | columns for number in range(4)]
    run = run_of("one")
    run.evaluation["curves"] = {"lambda": {"values": values, "mean": columns, "clients": clients}}
    root = parse(plots.along(run, "lambda"))
    assert len(paths(root, plots.COLOURS[0])) == 2  # a mean per metric
    assert len([line for line in paths(root, plots.GREY) if len(line) == 3]) == 8
    assert texts(root).count("lambda") == 2


def test_names_without_glyphs_and_narrow_axes_warn_nobody():
    run = run_of("実験-ⵣ")
    run.evaluation["personal"]["confusion"] = [[1]] * 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse(plots.confusion(run))
        plane = Plane(0, [0.0, 1.0], [0.0, 1.0], {"nll": [[1.0, 2.0]] * 2}, {"実験": (0.0, 0.0)})
        parse(plots.contours(plane))


def test_scores_of_own_and_foreign_samples_are_two_histograms():
    run = run_of("one")
    found = {"borders": [-1.0, 0.0, 1.0], "own": [3, 1, 0, 0], "foreign": [0, 0, 1, 1]}
    run.evaluation["ood"] = {"scores": found}
    root = parse(plots.scores(run, plots.COLOURS[0]))
    assert "share of samples" in texts(root)
    own, foreign = (
        [
            p
            for g in root.iter(f"{SVG}g")
            if g.get("id", "").startswith("patch_")
            for p in g.findall(f"{SVG}path")
            if f"{kind}: {colour.lower()}" in p.get("style", "")
        ]
        for kind, colour in (("fill", plots.COLOURS[0]), ("stroke", plots.COLOURS[1]))
    )
    assert len(own) == len(foreign) == 1


def test_a_confusion_matrix_has_a_cell_per_pair_of_classes():
    run = run_of("one")
    run.evaluation["personal"]["confusion"] = [[8, 2], [0, 5]]
    root = parse(plots.confusion(run))
    assert {"predicted class", "class"} <= set(texts(root))
    assert {"80", "20", "100"} <= set(texts(root))  # per cent of a class's samples
    named = attrs.evolve(run, description={"classes": ["well", "a rare disease"]})
    assert texts(parse(plots.confusion(named))).count("a rare d...") == 2


def test_contours_mark_every_network():
    plane = Plane(
        3,
        [0.0, 1.0, 2.0],
        [0.0, 1.0],
        {"nll": [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]},
        {"client": (0.0, 0.0), "initialisation": (1.5, 0.5)},
    )
    root = parse(plots.contours(plane))
    assert {"client", "initialisation", "NLL (nats)"} <= set(texts(root))


def test_lines_have_dashes_once_the_colours_are_used_up():
    styles = [tuple(plots.line_style(place).values()) for place in range(24)]
    assert len(set(styles)) == 24
    assert {dashes for _, dashes in styles[:6]} == {"-"}
    assert plots.line_style(24) == plots.line_style(0)


def test_points_have_bars_and_names_and_leave_out_what_is_not_known():
    found = {"NLL": [(0.5, 0.2, 0.9), None], "ECE": [(0.1, 0.1, 0.1), (0.3, 0.0, 0.4)]}
    root = parse(plots.points(["one", "two" * 40], found, "mean", {"NLL": 0.5}))
    shown = texts(root)
    assert {"one", "NLL", "ECE", "mean"} <= set(shown)
    assert any(text.startswith("twotwo") and text.endswith(" ...") for text in shown)
    bars = [line for line in paths(root, plots.COLOURS[0], "LineCollection") if len(line) == 2]
    assert len(bars) == 3
    (marked,) = (line for line in paths(root, plots.GREY) if np.ptp(line[:, 1]) > 50)
    first = bars[0]
    assert first[:, 0].min() < marked[0, 0] < first[:, 0].max()
    assert (marked[0, 0] - first[0, 0]) / np.ptp(first[:, 0]) == pytest.approx(0.3 / 0.7, abs=1e-3)
