"""Runs of which every number is known, and what is drawn of them, read from the SVG."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np

from bflcore.report.reading import Run

SVG = "{http://www.w3.org/2000/svg}"
BINS = 5


def metric(value):
    return {"mean": value, "std": 0.1, "pooled": value + 0.01}


def run_of(label, rounds=4, task="classification", groups=("personal", "global"), **experiment):
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
    settings = {"seed": 0} | experiment
    return Run(Path(label), settings, records, {}, {"personal": personal}, {})


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


def bands(root):
    """Return the outlines of the filled bands, as arrays of points ``[n, 2]``."""
    found = []
    for group in root.iter(f"{SVG}g"):
        if group.get("id", "").startswith("FillBetween"):
            below = float(next(group.iter(f"{SVG}use")).get("y"))
            for path in group.iter(f"{SVG}path"):
                numbers = re.findall(r"-?\d+\.?\d*", path.get("d", ""))
                found.append(np.add(np.array(numbers, float).reshape(-1, 2), [0, below]))
    return found
