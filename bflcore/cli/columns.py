"""Aligned columns of text, which read the same in a terminal, a file and a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["columns"]


def columns(rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Return a line per row, its cells padded to the width of their column but the last."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)][:-1]
    lines = (
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in cells
    )
    return [f"{indent}{line}".rstrip() for line in lines]
