"""Ask trained models about three images: two digits, and a letter, which is none.

    python examples/ask.py runs/demo-predictions.png runs/demo-bpfed runs/demo-fedper

The digits are the test samples of one client of which its model in the first run is most and least
certain. Every run's model of that client says what it sees and how sure it is; the picture shows
the images above the first model's probabilities.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

import bflcore
from bflcore.data.partition import Partition
from bflcore.data.sources import MNIST5k

CLIENT = 0
Images = npt.NDArray[np.float32]


def letter_k() -> Images:
    """Return a letter K ``[1, 28, 28]``, drawn with bright lines like those of a digit."""
    row, column = np.mgrid[:28, :28]
    stem = (np.abs(column - 9) < 1.5) & (row >= 4) & (row <= 23)
    arms = (np.abs(np.abs(row - 13.5) - (column - 10)) < 1.6) & (column >= 9) & (column <= 19)
    return (stem | arms).astype(np.float32)[None]


def main(picture: str, first: str, *others: str) -> None:
    """Print what the models answer, and write the picture."""
    data = MNIST5k().load()
    own = Partition.load(Path(first) / "partition.npz").test[CLIENT]
    models = {folder: bflcore.load(folder).client(CLIENT) for folder in (first, *others)}
    doubts = {folder: model.predict(data.x[own]).entropy for folder, model in models.items()}
    sure, unsure = (int(own[i]) for i in (doubts[first].argmin(), doubts[first].argmax()))
    asked = {
        f"a usual {data.y[sure]}": data.x[sure],
        f"an unusual {data.y[unsure]}": data.x[unsure],
        "the letter K": letter_k(),
    }
    images = np.stack([*asked.values()])
    answers = {folder: model.predict(images) for folder, model in models.items()}
    for folder, found in answers.items():
        print(f"\n{folder}, client {CLIENT}, asked about three images:")
        for i, name in enumerate(asked):
            share = 100 * float((doubts[folder] < found.entropy[i]).double().mean())
            print(f"  {name:14} {guesses(found.probabilities[i].tolist()):28} ", end="")
            print(f"less certain than on {share:3.0f} % of its test digits")
    draw(asked, answers[first], Path(picture))
    print(f"\npicture: {picture}")


def guesses(probabilities: list[float]) -> str:
    """Return up to three likely digits with their probabilities, the likeliest first."""
    ranked = sorted(enumerate(probabilities), key=lambda pair: -pair[1])
    return ", ".join(f"{digit} ({100 * p:.0f} %)" for digit, p in ranked[:3] if p >= 0.1)


def draw(asked: dict[str, Images], found: bflcore.ClassPrediction, out: Path) -> None:
    """Draw the images above the probabilities, and how far these scatter over parameter draws."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, len(asked), height_ratios=(3, 2))
    scatter = found.draws.std(0, correction=0)
    for i, (name, image) in enumerate(asked.items()):
        upper[i].imshow(image[0], cmap="gray_r")
        upper[i].set_axis_off()
        upper[i].set_title(name)
        heights, errors = found.probabilities[i].tolist(), scatter[i].tolist()
        lower[i].bar(range(10), heights, yerr=errors, color="#0072B2")
        lower[i].set(ylim=(0, 1), xticks=range(10))
    lower[0].set_ylabel("probability")
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
