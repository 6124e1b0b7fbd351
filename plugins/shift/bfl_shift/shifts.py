"""Shifts: how the samples that clients are asked about differ from those that they trained on.

Every draw belongs to ``(seed, client, shift)``: a client is shifted in the same way for all
methods, whichever other shifts are evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
from scipy import ndimage

from bfl_shift.settings import CLEAN, NOISY, TINY, Setting
from bflcore.errors import OptionError, unknown
from bflcore.randomness import SERVER, numpy_stream

__all__ = [
    "REFERENCE",
    "Samples",
    "Shift",
    "blurred",
    "chosen_shifts",
    "drawn",
    "prior_shifted",
    "resized",
    "rotated",
    "shifts_of",
]

Array = Any  # of numpy

REFERENCE = "reference"
ANGLES = 15.0, 45.0  # degrees, to either side
WIDTHS = 1.0, 2.0  # standard deviation of the blur, in pixels of an image of 28x28
SIDE = 28
FOREIGN = 200  # foreign samples per client


@attrs.frozen(eq=False)
class Samples:
    """Test samples: images `x` ``[B, C, H, W]`` in [0, 1], labels `y` ``[B]``."""

    x: Array
    y: Array


Tests = Mapping[int, Samples]  # by the client's number
Change = Callable[[Tests, int, np.random.Generator], Samples]


@attrs.frozen
class Shift:
    """A shift: which training it tests, on which clients, and what it does to their test samples.

    `change` takes all clients' test samples, a client and its generator. `foreign` names a data set
    that clients should tell from their own samples.
    """

    name: str
    training: str
    summary: str
    change: Change = lambda tests, client, _: tests[client]
    novel: bool = False
    foreign: str = ""

    def of(self, tests: Tests, client: int, seed: int) -> Samples:
        """Return the samples that a client is asked about."""
        return self.change(tests, client, drawn(seed, client, self.name))


def drawn(seed: int, client: int, purpose: str) -> np.random.Generator:
    """Return the generator of what is drawn for a client."""
    return numpy_stream(seed, SERVER, client, f"shift {purpose}")


def rotated(tests: Tests, client: int, rng: np.random.Generator) -> Samples:
    """Turn a client's images by one angle of 15 to 45 degrees, to either side (bilinear)."""
    angle = rng.uniform(*ANGLES) * rng.choice([-1.0, 1.0])
    own = tests[client]
    x = ndimage.rotate(own.x, angle, axes=(2, 3), reshape=False, order=1)
    return Samples(np.clip(x, 0, 1), own.y)


def blurred(tests: Tests, client: int, rng: np.random.Generator) -> Samples:
    """Blur a client's images by one Gaussian, 1 to 2 pixels wide in an image of 28x28."""
    own = tests[client]
    width = rng.uniform(*WIDTHS) * own.x.shape[-1] / SIDE
    x = ndimage.gaussian_filter(own.x, (0, 0, width, width), mode="nearest")
    return Samples(np.clip(x, 0, 1), own.y)


def prior_shifted(tests: Tests, client: int, rng: np.random.Generator) -> Samples:
    """Ask a client about the classes of all clients, each equally often.

    As many samples as the client has, drawn without replacement from all clients' test samples: the
    frequency of labels changes, and p(x | y) does not.
    """
    x = np.concatenate([one.x for one in tests.values()])
    y = np.concatenate([one.y for one in tests.values()])
    classes = np.unique(y)
    count = min(len(tests[client].y) // len(classes), *(np.sum(y == c) for c in classes))
    rows = [rng.choice(np.flatnonzero(y == c), max(1, count), replace=False) for c in classes]
    chosen = np.sort(np.concatenate(rows))
    return Samples(x[chosen], y[chosen])


def resized(x: Array, shape: tuple[int, ...]) -> Array:
    """Return images ``[N, C, H, W]`` in another height and width (bilinear).

    Images that shrink are smoothed before, by (factor - 1) / 2 as scikit-image does.
    """
    if x.shape[1] != shape[0]:
        raise OptionError(
            f"images have {x.shape[1]} channels, but those of the clients have {shape[0]}"
        )
    factors = [new / old for new, old in zip(shape[1:], x.shape[2:], strict=True)]
    smooth = [max(0.0, (1 / factor - 1) / 2) for factor in factors]
    if any(smooth):
        x = ndimage.gaussian_filter(x, (0, 0, *smooth), mode="nearest")
    if any(factor != 1 for factor in factors):
        x = ndimage.zoom(x, (1, 1, *factors), order=1, mode="nearest", grid_mode=True)
    return np.clip(x, 0, 1).astype(np.float32)


def foreign_of(images: Array, shape: tuple[int, ...], seed: int, client: int, name: str) -> Array:
    """Return the foreign samples of a client, at most `FOREIGN` of the images ``[N, C, H, W]``."""
    rows = drawn(seed, client, name).permutation(len(images))[:FOREIGN]
    return resized(images[np.sort(rows)], shape)


def shifts_of(setting: Setting) -> dict[str, Shift]:
    """Return the shifts of a setting by name; the first is the reference without any."""
    found = (
        Shift(REFERENCE, CLEAN, "no shift: test samples like the training samples"),
        Shift("novel-clients", CLEAN, "clients that were not trained, adapted", novel=True),
        Shift("tiny-clients", TINY, "clients with four samples per class"),
        Shift("rotation", CLEAN, "each client's images turned by 15 to 45 degrees", rotated),
        Shift("blur", CLEAN, "each client's images blurred", blurred),
        Shift("label-noise", NOISY, "30 % of the training labels are wrong"),
        Shift("prior-shift", CLEAN, "all classes equally often, also the unseen", prior_shifted),
        *(
            Shift(name, training, _foreign_summary(setting, training, data), foreign=data)
            for name, (training, data) in setting.foreign.items()
        ),
    )
    return {one.name: one for one in found}


def chosen_shifts(setting: Setting, text: str) -> tuple[Shift, ...]:
    """Return the shifts that a text names, separated by commas, or all, in their order.

    The reference is always among them. Raises `OptionError` for an unknown one.
    """
    known = shifts_of(setting)
    names = [word.strip() for word in text.split(",")] if text else list(known)
    for name in names:
        if name not in known:
            raise unknown("shift", name, known, "bfl shift --list explains them")
    return tuple(one for one in known.values() if one.name in {REFERENCE, *names})


def _foreign_summary(setting: Setting, training: str, data: str) -> str:
    return f"images of {data} against those of {setting.data_of(training)}"
