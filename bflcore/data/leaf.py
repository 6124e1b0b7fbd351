"""LEAF's data sets, read from the JSON files that its scripts write.

A data set is a folder with the folders ``train`` and ``test``, each with one or more ``*.json``:
``users``, their ``num_samples``, and ``user_data`` with the samples ``x`` and labels ``y`` of each.
Users are the owners of their samples, numbered in the order of their names; each keeps its own part
of LEAF's test split. Files are read one at a time, and samples are kept as bytes.

Reference: Caldas et al. 2018, LEAF: a benchmark for federated settings.
"""

from __future__ import annotations

import abc
import functools
import json
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from bflcore.data.base import Dataset, DataSource
from bflcore.errors import DataError
from bflcore.lazy import lazy
from bflcore.options import component

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy("numpy")

__all__ = ["CHARACTERS", "FEMNIST", "LEAF", "Shakespeare"]

# LEAF's vocabulary in LEAF's order, which is that of their codes; k stands for the k-th of them.
CHARACTERS = (
    "\n !\"&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]"
    + string.ascii_lowercase + "}"
)  # fmt: skip
CODES = {character: code for code, character in enumerate(CHARACTERS)}
WINDOW = 80  # characters before the one to be predicted
SIDE = 28  # pixels
PARTS = ("train", "test")


@attrs.frozen(eq=False)
class Split:
    """One half of the data: samples ``[N, ...]`` uint8, labels ``[N]``, their users ``[N]``."""

    x: Any
    y: Any
    user: tuple[str, ...]


class LEAF(DataSource):
    """Base of LEAF's data sets; a subclass says what its samples and labels are."""

    public = True
    classes: int
    unit: float  # see `Dataset`
    command: str  # writes the files, in LEAF's folder of the data set

    def load(self, folder: Path | None = None, download: bool = False) -> Dataset:
        """Read ``train`` and ``test`` in `folder`, or in LEAF's folders below it.

        Raises `DataError` for absent and damaged files, and unless both halves have the same users.
        """
        train, test = (self._split(place) for place in self._places(folder))
        users = {user: number for number, user in enumerate(sorted(set(train.user)))}
        if strangers := users.keys() ^ set(test.user):
            raise DataError(
                f"{self.name}: user {min(strangers)!r} is in one of the folders train and test "
                f"alone; divide the samples of each user: {self.command}"
            )
        owners, owners_test = (
            np.array([users[user] for user in half.user], np.int64) for half in (train, test)
        )
        return Dataset(
            self.name,
            "classification",
            train.x,
            train.y,
            self.classes,
            owners,
            test.x,
            test.y,
            client_test=owners_test,
            unit=self.unit,
        )

    @abc.abstractmethod
    def sample(self, x: Any) -> Any:
        """Return the bytes of one sample ``[...]``. Raises `ValueError` saying what is wrong."""

    @abc.abstractmethod
    def label(self, y: Any) -> int:
        """Return the class of one label. Raises `ValueError` saying what is wrong."""

    def _places(self, folder: Path | None) -> list[Path]:
        """Return the folders of the halves. Raises `DataError` saying how to get the files."""
        # LEAF writes to data/NAME/data; any of these folders may be given.
        inside = ("", "data", self.name, f"{self.name}/data")
        for root in [] if folder is None else [folder / path for path in inside]:
            places = [root / part for part in PARTS]
            if all(any(place.glob("*.json")) for place in places):
                return places
        where = "--data-dir is not given" if folder is None else f"not in {folder}"
        raise DataError(
            f"{self.name}: {where}; give the folder that holds train/*.json and test/*.json with "
            "--data-dir; to get them: git clone https://github.com/TalwalkarLab/leaf, then "
            f"{self.command}"
        )

    def _split(self, place: Path) -> Split:
        found = [self._file(path) for path in sorted(place.glob("*.json"))]
        files = Counter(user for one in found for user in set(one.user))
        if twice := [user for user, count in files.items() if count > 1]:
            raise DataError(
                f"{place}: user {min(twice)!r} is in two files, as when an older split is left "
                f"behind; empty the folder, then {self.command}"
            )
        return Split(
            np.concatenate([one.x for one in found]),
            np.concatenate([one.y for one in found]),
            tuple(user for one in found for user in one.user),
        )

    def _file(self, path: Path) -> Split:
        samples, labels, owners = [], [], []
        for user, x, y in _users(path):
            for k, (sample, label) in enumerate(zip(x, y, strict=True)):
                try:
                    samples.append(self.sample(sample))
                    labels.append(self.label(label))
                except (ValueError, TypeError) as error:
                    raise _damaged(path, f"sample {k} of user {user!r}: {error}") from None
            owners += [user] * len(x)
        if not samples:
            raise _damaged(path, "it has no samples")
        return Split(np.stack(samples), np.array(labels, np.int64), tuple(owners))


@component
class Shakespeare(LEAF):
    """Shakespeare's plays by LEAF: the next of 80 characters after 80; roles are natural owners.

    Inputs are character codes ``[N, 80]``, classes the code of the character that follows. LEAF
    divides each role's samples at random; windows that overlap are on both sides of its split.
    """

    name = "shakespeare"
    reference = "Caldas et al. 2018 (LEAF), after McMahan et al. 2017, section 3"
    classes = len(CHARACTERS)
    unit = 1.0
    command = "cd leaf/data/shakespeare && ./preprocess.sh -t sample --tf 0.8"

    def sample(self, x: Any) -> Any:
        """Return the codes ``[80]`` of a string of 80 characters."""
        if not isinstance(x, str) or len(x) != WINDOW:
            raise ValueError(f"x is not a string of {WINDOW} characters")
        characters = np.frombuffer(x.encode("latin-1"), np.uint8)
        codes = _table()[characters]
        if codes.max() == len(CHARACTERS):
            _code(x[int(codes.argmax())])  # which says what is wrong
        return codes

    def label(self, y: Any) -> int:
        """Return the code of the next character."""
        return _code(y)


@component
class FEMNIST(LEAF):
    """Handwritten digits and letters by LEAF, 28x28, 62 classes; writers are natural owners.

    Pixels are as LEAF stores them: the paper is 1 and the ink 0, opposite to MNIST and EMNIST.
    Classes 0 to 9 are digits, 10 to 35 capital and 36 to 61 small letters.
    """

    name = "femnist"
    reference = "Caldas et al. 2018 (LEAF), after Cohen et al. 2017"
    classes = 62
    unit = 255.0
    command = "cd leaf/data/femnist && ./preprocess.sh -t sample"

    def sample(self, x: Any) -> Any:
        """Return the pixels ``[1, 28, 28]`` of a list of 784 numbers, multiples of 1/255."""
        pixels = np.asarray(x, np.float64)
        if pixels.shape != (SIDE**2,):
            raise ValueError(f"x has shape {pixels.shape}, not {SIDE}x{SIDE} numbers in a row")
        scaled = pixels * self.unit
        found = np.rint(scaled)
        if not (np.abs(scaled - found) < 1e-3).all() or found.min() < 0 or found.max() > self.unit:
            raise ValueError("x has pixels that are not multiples of 1/255 between 0 and 1")
        return found.astype(np.uint8).reshape(1, SIDE, SIDE)

    def label(self, y: Any) -> int:
        """Return the class, which LEAF stores as it is."""
        if isinstance(y, bool) or not isinstance(y, int) or not 0 <= y < self.classes:
            raise ValueError(f"y is {y!r}, not a class from 0 to {self.classes - 1}")
        return y


def _users(path: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield each user's name, samples and labels. Raises `DataError` for a damaged file."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    except ValueError as error:  # also bytes that are not text
        raise _damaged(path, str(error)) from None
    try:
        users, counts, data = (content[key] for key in ("users", "num_samples", "user_data"))
        for user, count in zip(users, counts, strict=True):
            own = data.pop(user)
            x, y = own["x"], own["y"]
            sizes = len(x), len(y)
            if sizes != (count, count):
                break
            yield user, x, y
        else:
            return
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise _damaged(path, reason) from None
    raise _damaged(
        path,
        f"user {user!r} has {sizes[0]} samples and {sizes[1]} labels, num_samples says {count}",
    )


@functools.cache
def _table() -> Any:
    """Return the codes of the first 256 characters; that of an unknown one is too large by one."""
    return np.array([CODES.get(chr(k), len(CODES)) for k in range(256)], np.uint8)


def _code(character: Any) -> int:
    if not isinstance(character, str) or character not in CODES:
        raise ValueError(f"{character!r} is not one of LEAF's {len(CODES)} characters")
    return CODES[character]


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"{path} is damaged: {reason}; write it again with LEAF's preprocess.sh")
