"""The picture of a study: lines over a numeric axis, else points."""

import xml.etree.ElementTree as ET

from bflcore.studies.cells import Cell
from bflcore.studies.grids import Entry, axis_of, cells_of
from bflcore.studies.plots import numeric_axis, plot
from bflcore.studies.results import Results

from .quick import results, trial


def grid(**axes):
    cells = [
        Cell(f"c{i}", "fedavg", {}, {}, dict(zip(axes, point, strict=True)))
        for i, point in enumerate(zip(*axes.values(), strict=True))
    ]
    trials = [
        trial(cell.name, seed, personal__nll=i + seed, personal__accuracy=0.1 * i)
        for i, cell in enumerate(cells)
        for seed in (0, 1)
    ]
    return Results(tuple(cells), (0, 1), tuple(trials))


def test_the_axis_is_the_only_one_with_numbers():
    assert numeric_axis(grid(lr=["0.1", "1"], hyper=["a", "b"]).cells) == "lr"
    assert numeric_axis(grid(lr=["0.1", "1"], rounds=["1", "2"]).cells) == ""
    assert numeric_axis(grid(lr=["0.1", "0.1"], rounds=["1", "2"]).cells) == "rounds"
    assert numeric_axis(grid(partition=["iid", "labels:5"]).cells) == ""


def test_a_picture_is_the_same_for_the_same_results():
    for found in (grid(lr=["0.001", "0.1", "1"]), grid(partition=["iid", "labels:5"])):
        first = plot(found, ["personal.nll", "personal.accuracy"])
        assert first == plot(found, ["personal.nll", "personal.accuracy"])
        ET.fromstring(first)
        assert "personal.nll" in first


def test_an_axis_of_many_magnitudes_is_logarithmic_and_shows_its_values():
    text = plot(grid(lr=["0.001", "0.1", "1"]), ["personal.nll"])
    for value in (">0.001<", ">0.1<", ">1<", ">lr<"):
        assert value in text
    several = plot(grid(lr=["1", "2", "1", "2"], hyper=["a", "a", "b", "b"]), ["personal.nll"])
    assert "hyper=a" in several


def test_entries_of_a_list_are_lines_of_their_own():
    """Two optimisers, each at two rates on two partitions: four lines of two points."""
    entries = [Entry("", "", {}, {"inference.optimiser": name}) for name in ("adam", "sgd")]
    axes = [axis_of("inference.lr", [0.1, 0.2]), axis_of("partition", ["iid", "natural"])]
    cells = cells_of(["fedavg"], axes, {}, {}, entries)
    trials = [trial(cell.name, 0, personal__nll=1.0) for cell in cells]
    text = plot(Results(tuple(cells), (0,), tuple(trials)), ["personal.nll"])
    for name in ("fedavg,1, partition=iid", "fedavg,2, partition=natural"):
        assert f">{name}<" in text
    assert text.count(">fedavg,") == 4


def test_cells_without_an_axis_are_named_beside_their_points():
    text = plot(results({"one": [1.0], "three": [2.0, 3.0]}), ["personal.accuracy"])
    assert ">one<" in text
    assert ">three<" in text
