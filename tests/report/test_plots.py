"""What the pictures show, read from their SVG."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from xml.etree import ElementTree as ET

import attrs
import numpy as np
import pytest

from bflcore.report import plots
from bflcore.report.landscape import Plane
from bflcore.report.reading import Run

SVG = "{http://www.w3.org/2000/svg}"
BINS = 5


def metric(value):
    return {"mean": value, "std": 0.1, "pooled": value + 0.01}


def run_of(label, rounds=4, task="classification", groups=("personal", "global")):
    """Return a finished run as a report reads it, of which every number is known."""
    names = ("accuracy", "nll", "ece") if task == "classification" else ("rmse", "nll")
    names += () if task == "classification" else ("coverage90",)
    records = [
        {"round": n} | {f"{g}.{name}": metric(0.1 * n) for g in groups for name in names}
        for n in range(1, rounds + 1)
    ]
    middles = [(i + 0.5) / BINS for i in range(BINS)]
    personal = {
        "clients": [],
        "reliability": {"count": [0, 2, 4, 2, 0], "confidence": middles, "accuracy": middles},
        "retention": {"retained": [0.25, 0.5, 1.0], "accuracy": [1.0, 0.9, 0.8]},
    }
    return Run(Path(label), {}, records, {}, {"personal": personal}, {})


def parse(svg):
    """Return the picture's root, having looked for numbers that cannot be drawn."""
    assert not re.search(r"\bnan\b|\binf\b", svg, re.IGNORECASE)
    return ET.fromstring(svg)


def texts(root):
    return [text.text for text in root.iter(f"{SVG}text") if text.text]


def paths(root, colour=None, kind="line2d"):
    """Return the drawn lines inside the axes, of one colour, as arrays of points ``[n, 2]``."""
    found = []
    for axes in (g for g in root.iter(f"{SVG}g") if g.get("id", "").startswith("axes_")):
        for group in axes:
            if not group.get("id", "").startswith(kind):
                continue
            for path in group.findall(f"{SVG}path"):
                if colour is None or f"stroke: {colour.lower()}" in path.get("style", ""):
                    numbers = re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", path.get("d", ""))
                    found.append(np.array(numbers, float).reshape(-1, 2))
    return found


def test_learning_curves_draw_every_run_group_and_metric():
    runs = [run_of("one"), run_of("two", rounds=3, groups=("personal",))]
    root = parse(plots.learning_curves(runs))
    first, second = (paths(root, colour) for colour in plots.COLOURS[:2])
    assert [len(line) for line in first] == [4] * 6  # three metrics of two groups, four rounds
    assert [len(line) for line in second] == [3] * 3
    for line in first:
        assert np.allclose(np.diff(line[:, 0]), np.diff(line[:, 0])[0])  # rounds are equidistant
        assert (np.diff(line[:, 1]) < 0).all()  # SVG counts downwards: the values rise
    shown = texts(root)
    assert shown.count("round") == 3
    assert {"accuracy", "NLL (nats)", "ECE"} <= set(shown)
    assert not {"one", "two"} & set(shown)  # the page's legend names runs, and hides no curve


def test_learning_curves_of_regressions_draw_their_metrics():
    root = parse(plots.learning_curves([run_of("one", task="regression")]))
    assert {"RMSE", "NLL (nats)", "coverage90"} <= set(texts(root))
    assert len(paths(root, plots.COLOURS[0])) == 6


def test_the_servers_model_is_dashed():
    svg = plots.learning_curves([run_of("one")])
    styles = [s for s in re.findall(r'style="([^"]*)"', svg) if "stroke: #0072b2" in s]
    dashed = [style for style in styles if "stroke-dasharray" in style]
    assert len(styles) == 2 * len(dashed)
    assert len(dashed) == 3  # each metric


def test_a_value_that_is_not_a_number_leaves_a_gap():
    run = run_of("one")
    run.records[1]["personal.nll"] = metric(float("nan"))
    root = parse(plots.learning_curves([run]))
    assert sorted(len(line) for line in paths(root, plots.COLOURS[0])) == [3, 4, 4, 4, 4, 4]


def test_a_reliability_diagram_draws_the_filled_bins_beside_the_diagonal():
    root = parse(plots.reliability([run_of("one"), run_of("two")]))
    (diagonal,) = (line for line in paths(root, plots.GREY) if np.ptp(line[:, 0]) > 100)
    for colour in plots.COLOURS[:2]:
        (line,) = (line for line in paths(root, colour) if len(line) > 1)
        assert len(line) == 3  # bins without samples are left out
        # A calibrated model lies on the diagonal, through its two ends.
        (x0, y0), (x1, y1) = diagonal
        assert np.allclose(line[:, 1], y0 + (y1 - y0) * (line[:, 0] - x0) / (x1 - x0), atol=0.01)
    assert texts(root).count("confidence") == 3  # two axes, one title
    assert {"accuracy", "share of samples"} <= {*texts(root)}


def test_a_retention_curve_draws_its_points():
    root = parse(plots.retention([run_of("one")]))
    line, risk, ideal = paths(root, plots.COLOURS[0])
    assert len(line) == len(risk) == 3
    assert (np.diff(risk[:, 1]) < 0).all()  # SVG counts downwards: the error rises
    assert (ideal[np.searchsorted(ideal[:, 0], risk[:, 0]) - 1, 1] >= risk[:, 1] - 0.1).all()
    assert (np.diff(line[:, 1]) > 0).all()  # less accurate, the more samples are kept
    assert {"fraction retained", "accuracy"} <= set(texts(root))


def test_a_run_without_evaluated_clients_leaves_pictures_empty():
    empty = Run(Path("none"), {}, [{"round": 1}], {}, {}, {})
    for draw in (plots.learning_curves, plots.reliability, plots.retention):
        assert not paths(parse(draw([empty])), plots.COLOURS[0])


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


def test_curves_are_means_over_clients_in_every_picture():
    run = run_of("one")
    for record in run.records:
        for value in record.values():
            if isinstance(value, dict):
                value["pooled"] = float("nan")  # would leave nothing to draw
    root = parse(plots.learning_curves([run]))
    assert [len(line) for line in paths(root, plots.COLOURS[0])] == [4] * 6


def test_a_run_has_one_colour_in_all_pictures():
    runs = [run_of("one"), run_of("two")]
    del runs[0].evaluation["personal"]
    for draw in (plots.reliability, plots.retention):
        root = parse(draw(runs))
        assert not paths(root, plots.COLOURS[0])
        assert paths(root, plots.COLOURS[1])


def test_names_without_glyphs_and_narrow_axes_warn_nobody():
    run = run_of("実験-ⵣ")
    run.evaluation["personal"]["confusion"] = [[1]] * 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for draw in (plots.learning_curves, plots.reliability, plots.retention):
            parse(draw([run]))
        plane = Plane(0, [0.0, 1.0], [0.0, 1.0], {"nll": [[1.0, 2.0]] * 2}, {"実験": (0.0, 0.0)})
        parse(plots.contours(plane))


def test_scores_of_own_and_foreign_samples_are_two_histograms():
    run = run_of("one")
    found = {"borders": [-1.0, 0.0, 1.0], "own": [3, 1, 0, 0], "foreign": [0, 0, 1, 1]}
    run.evaluation["ood"] = {"scores": found}
    root = parse(plots.scores([run], run))
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


@pytest.mark.parametrize("draw", [plots.learning_curves, plots.reliability, plots.retention])
def test_the_same_runs_give_the_same_picture(draw):
    assert draw([run_of("one")]) == draw([run_of("one")])
