"""Targets and owners as users have them: labels, names or amounts; numbers or names of owners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import attrs

from bflcore.data.tables import missing, numbers, texts
from bflcore.errors import DataError
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy("numpy")

__all__ = ["Targets", "owners_of", "targets_of"]

Task = Literal["classification", "regression"]

FEW = 10  # more different whole numbers than this are amounts rather than labels


@attrs.frozen(eq=False)
class Targets:
    """Class labels ``[N]`` int64 or real targets ``[N, T]`` float32, and how they were understood.

    `names` are those of the classes by label, where they differ from 0..C-1.
    """

    task: Task
    y: Any
    classes: int = 0
    names: tuple[str, ...] = ()
    note: str = ""


def targets_of(
    values: Any, where: str, name: str, task: str | None = None, *, table: bool = False
) -> Targets:
    """Return the targets of `values` ``[N]`` or ``[N, T]``, the array or column `name` of `where`.

    `task` decides, if it is given. Otherwise names, truth values and one-hot rows are labels, and
    numbers with fractions are amounts. Whole numbers are labels in a `table` if there are few of
    them. In an array, integers must be labels 0..C-1; real numbers are labels if they are 0..C-1.
    Raises `DataError` if neither fits.
    """
    if values.ndim > 2 or values.size == 0:
        raise DataError(
            f"{where}: {name} has shape {values.shape}; allowed: [N] or [N, targets], not empty"
        )
    if values.ndim == 2 and values.shape[1] > 1:
        return _of_rows(values, where, name, task)
    flat = values.reshape(-1)
    gaps = missing(flat)
    if gaps.any():
        raise DataError(
            f"{where}: {name} is missing in {int(gaps.sum())} samples (the first is sample "
            f"{int(gaps.argmax())}); remove these samples"
        )
    amounts = None if flat.dtype.kind == "b" and task != "regression" else numbers(flat, gaps)
    if amounts is None or _is_words(flat):
        return _of_names(flat, where, name, task)
    if not _fits(amounts):
        raise DataError(f"{where}: {name} has infinity or more than float32 holds; remove it")
    whole = bool((amounts == np.floor(amounts)).all())
    if task is None:
        integers = flat.dtype.kind in "iu"
        task = _task(amounts, whole, where, name, integers=integers, table=table)
    if task == "regression":
        note = f"task: regression on {name}"
        if whole:
            kinds = len(np.unique(amounts))
            note += (
                f" ({kinds} different whole numbers; --task classification takes them as labels)"
            )
        return Targets("regression", amounts.astype(np.float32).reshape(-1, 1), note=note)
    if not whole:
        raise DataError(
            f"--task: {where}: {name} has fractions, which are not labels; allowed: regression"
        )
    return _labelled(amounts.astype(np.int64), where, name, numeric=True)


def owners_of(values: Any, where: str, name: str) -> tuple[Any, tuple[int | str, ...]]:
    """Return each sample's owner ``[N]`` int64, and the owners' ids by that number, in order.

    Whole numbers stay numbers (900, and not "900"), unless zeros lead them. Raises `DataError` if
    an owner is missing or is not a whole number or a text.
    """
    if values.ndim != 1:
        raise DataError(f"{where}: {name} has shape {values.shape}; allowed: one owner per sample")
    gaps = missing(values)
    if gaps.any():
        raise DataError(
            f"{where}: {name} is missing in {int(gaps.sum())} samples (the first is sample "
            f"{int(gaps.argmax())}); name their owner, or remove them"
        )
    if values.dtype.kind == "f" and (values != np.floor(values)).any():
        raise DataError(f"{where}: {name} has fractions; allowed: whole numbers or names of owners")
    names = texts(values, gaps)
    if all(_is_plain_number(one) for one in set(names)):
        ids, owners = np.unique(np.array([int(one) for one in names]), return_inverse=True)
    else:
        ids, owners = np.unique(np.array(names), return_inverse=True)
    return owners.astype(np.int64), tuple(ids.tolist())


def _of_rows(values: Any, where: str, name: str, task: str | None) -> Targets:
    """Read rows ``[N, T]``: one-hot labels, or several amounts."""
    real = numbers(values.reshape(-1), missing(values.reshape(-1)))
    if real is None or not _fits(real):
        raise DataError(
            f"{where}: {name} has values that are missing or not numbers; remove these samples"
        )
    rows = real.reshape(values.shape)
    one_hot = bool(np.isin(rows, (0, 1)).all() and (rows.sum(1) == 1).all())
    if one_hot and task != "regression":
        return _labelled(rows.argmax(1), where, f"{name}, one-hot", numeric=False)
    if task == "classification":
        raise DataError(
            f"--task: {where}: {name} has shape {values.shape}; allowed: one label per sample, or "
            "one-hot rows"
        )
    note = f"task: regression on {rows.shape[1]} targets"
    return Targets("regression", rows.astype(np.float32), note=note)


def _of_names(flat: Any, where: str, name: str, task: str | None) -> Targets:
    names = texts(flat, np.zeros(len(flat), bool))
    if task == "regression":
        odd = next((one for one in names if not _is_number(one)), names[0])
        raise DataError(
            f"{where}: {name} has {odd!r}, which is not a number; allowed: --task classification"
        )
    known, labels = np.unique(np.array(names), return_inverse=True)
    return _labelled(labels, where, name, tuple(known.tolist()))


def _labelled(
    labels: Any, where: str, name: str, names: tuple[str, ...] = (), *, numeric: bool = False
) -> Targets:
    """Number the labels ``[N]`` from 0 without gaps, and name the classes."""
    present, again = np.unique(labels, return_inverse=True)
    names = names or tuple(map(str, present.tolist()))
    if len(present) < 2:
        raise DataError(
            f"{where}: {name} has a single class; allowed: labels 0..C-1 with C >= 2, or names"
        )
    if len(present) > len(labels) / 2 and len(present) > FEW:
        raise DataError(
            f"{where}: {name} has {len(present)} different labels in {len(labels)} samples, like "
            "an id or an amount; choose another target, or --task regression for an amount"
        )
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    note = f"task: classification of {len(names)} classes ({name}: {listed})"
    if numeric:
        note += "; --task regression takes them as numbers"
    return Targets("classification", again.astype(np.int64), len(names), names, note)


def _task(amounts: Any, whole: bool, where: str, name: str, *, integers: bool, table: bool) -> str:
    """Return what numbers ``[N]`` are if nothing but themselves says it."""
    if not whole:
        return "regression"
    present = np.unique(amounts)
    complete = present[0] == 0 and present[-1] == len(present) - 1
    if table:
        return "classification" if len(present) <= FEW else "regression"
    if not integers:
        return "classification" if complete and 2 <= len(present) <= FEW else "regression"
    if present[0] < 0:
        raise DataError(
            f"{where}: {name} has the label {present[0]:.0f}; allowed: 0..C-1; --task regression "
            "takes them as amounts"
        )
    if len(present) > 1 and not complete:
        gap = int(np.flatnonzero(present != np.arange(len(present)))[0])
        raise DataError(
            f"{where}: {name} goes up to {present[-1]:.0f} but has no label {gap}; if these are "
            "amounts (days, counts): --task regression; if they are labels: --task classification"
        )
    return "classification"


def _fits(amounts: Any) -> bool:
    """Return whether float32 holds all values; false for NaN."""
    return bool((np.abs(amounts) <= np.finfo(np.float32).max).all())


def _is_words(flat: Any) -> bool:
    """Return whether the values are texts that are not numbers, such as yes and no."""
    return flat.dtype.kind in "OUS" and not all(_is_number(v) for v in set(flat.tolist()))


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_plain_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and str(int(text)) == text
