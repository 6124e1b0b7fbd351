"""Draw the pictures of gallery.md from short real runs: ``python docs/draw_gallery.py``.

Runs are written to a temporary folder. One seed each: the pictures show what there is to see, and
decide nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

import bflcore

IMAGES = Path(__file__).parent / "images"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "svg.hashsalt": "bflcore",
    "svg.fonttype": "none",
}
BLUE, ORANGE, GREEN, GREY = "#2166ac", "#d9772a", "#3a8f4d", "#9aa5b1"
QUIET: dict[str, Any] = {"workers": 1, "progress": False, "ood": "none"}


def main(names: list[str]) -> None:
    """Draw all pictures, or those that are named."""
    with tempfile.TemporaryDirectory() as folder, mpl.rc_context(STYLE):
        for name in names or [*PICTURES]:
            figure = PICTURES[name](Path(folder))
            path = IMAGES / f"gallery-{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB", flush=True)


def band(folder: Path) -> Figure:
    """Draw what clients know alone and together, each of whom sees a part of a curve."""
    random = np.random.default_rng(0)
    parts = [(-3.0, -1.5), (-1.8, -0.4), (0.6, 1.8), (1.5, 3.0)]
    x = np.concatenate([random.uniform(*part, 40) for part in parts])[:, None].astype("float32")
    y = (np.sin(2 * x) + 0.1 * random.normal(size=x.shape)).astype("float32")
    owner = np.repeat(range(len(parts)), 40)
    grid = np.linspace(-3.6, 3.6, 200, dtype="float32")[:, None]
    figure = Figure(figsize=(7.6, 2.8), layout="constrained")
    titles = {"none": "the first client alone", "all": "four clients together"}
    for axis, (share, title) in zip(
        figure.subplots(1, 2, sharey=True), titles.items(), strict=True
    ):
        run = bflcore.run(
            "pvi",
            data={"x": x, "y": y, "client": owner},
            out=folder / f"band-{share}",
            likelihood="gaussian",
            rounds=150,
            test_fraction=0.0,
            clients=4 if share == "all" else 1,
            options={
                "model.hidden": 50,
                "likelihood.noise_variance": 0.02,
                "model.activation": "tanh",
                "inference.lr": 0.01,
                "inference.damping": 0.25 if share == "all" else 1.0,
            },
            **QUIET,
        )
        found = run.client(0).predict(grid)
        mean, spread = found.mean[:, 0], 2 * found.std[:, 0]
        axis.fill_between(grid[:, 0], mean - spread, mean + spread, color=BLUE, alpha=0.2, lw=0)
        axis.plot(grid[:, 0], mean, color=BLUE)
        for client in range(4):
            own = owner == client
            seen = share == "all" or client == 0
            axis.plot(x[own, 0], y[own, 0], ".", ms=3, color=ORANGE if seen else GREY)
        axis.set(title=title, ylim=(-3, 3), xlabel="x")
    return figure


def rounds(folder: Path) -> Figure:
    """Draw accuracy and calibration over rounds, for a point estimate and two posteriors."""
    figure = Figure(figsize=(7.6, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = {"fedper": GREY, "bpfed": BLUE, "fedsi": ORANGE}
    for method, colour in colours.items():
        run = bflcore.run(
            method,
            data="digits",
            partition="labels:5",
            clients=6,
            train_per_class=10,
            rounds=40,
            eval_every=4,
            out=folder / method,
            **QUIET,
        )
        at = [line["round"] for line in run.history]
        for axis, metric in ((left, "accuracy"), (right, "nll")):
            values = [line[f"personal.{metric}"]["pooled"] for line in run.history]
            axis.plot(at, values, color=colour, label=method)
    left.set(title="accuracy (pooled)", xlabel="round")
    right.set(title="negative log likelihood (pooled)", xlabel="round", ylim=(0, None))
    right.legend(frameon=False)
    return figure


def sets(folder: Path) -> Figure:
    """Draw how often sets have the truth, and how large they are, against the rate asked for."""
    random = np.random.default_rng(0)
    x = random.normal(size=(1500, 2)).astype("float32")
    angle = np.arctan2(x[:, 1], x[:, 0]) + 0.35 * random.normal(size=len(x))
    y = ((angle + np.pi) / (2 * np.pi) * 5).astype(int) % 5
    run = bflcore.run(
        "fedvi",
        data={"x": x[:900], "y": y[:900], "client": np.arange(900) % 3},
        out=folder / "sets",
        rounds=30,
        calibration_fraction=0.3,
        options={"model.hidden": 30, "calibrator.conformal.empty": True},
        **QUIET,
    )
    found, truth = run.client(0).predict(x[900:]), y[900:]
    rates = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    members = [np.asarray(found.contains(rate), float) for rate in rates]
    figure = Figure(figsize=(7.6, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(rates, rates, color=GREY, lw=1, label="as asked")
    kept = [m[np.arange(len(truth)), truth].mean() for m in members]
    left.plot(rates, kept, "o-", color=BLUE, ms=4, label="kept on 600 new samples")
    left.set(title="sets that have the true class", xlabel="rate asked for")
    left.legend(frameon=False)
    right.plot(rates, [m.sum(1).mean() for m in members], "o-", color=ORANGE, ms=4)
    right.set(title="mean number of classes in a set", xlabel="rate asked for", ylim=(0, None))
    return figure


def doubt(folder: Path) -> Figure:
    """Draw where a client's model does not know, and where nobody can, on a plane."""
    random = np.random.default_rng(1)
    centres = np.array([[-1.2, 0.0], [1.2, 0.0]])
    y = np.arange(240) % 2
    x = (centres[y] + 0.7 * random.normal(size=(240, 2))).astype("float32")
    run = bflcore.run(
        "pvi",
        data={"x": x, "y": y, "client": np.arange(240) % 3},
        out=folder / "doubt",
        rounds=100,
        test_fraction=0.0,
        options={"model.hidden": 30, "inference.damping": 0.3, "inference.lr": 0.01},
        **QUIET,
    )
    ends = np.linspace(-6, 6, 41, dtype="float32")
    plane = np.stack(np.meshgrid(ends, ends), -1).reshape(-1, 2)
    found = run.server.predict(plane)
    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    titles = {"aleatoric": "cannot be known", "epistemic": "is not known yet"}
    for axis, (part, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        values = np.asarray(getattr(found, part)).reshape(41, 41)
        shades = axis.contourf(ends, ends, values, 6, cmap="Blues")
        figure.colorbar(shades, ax=axis, shrink=0.8)
        for label, colour in ((0, ORANGE), (1, GREEN)):
            axis.plot(*x[y == label].T, ".", ms=2, color=colour)
        axis.set(title=f"{part}: {title}", aspect="equal")
    return figure


PICTURES: dict[str, Callable[[Path], Figure]] = {
    "band": band,
    "doubt": doubt,
    "rounds": rounds,
    "sets": sets,
}

if __name__ == "__main__":
    main(sys.argv[1:])
