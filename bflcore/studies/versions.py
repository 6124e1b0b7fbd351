"""Versions of what runs were made with, and whether they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["differing"]


def differing(versions: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on versions that differ between runs; empty if none do.

    `versions` are those of runs' ``environment.json``. The platform is named only if nothing else
    differs.
    """
    found = [
        {"python": one.get("python"), "torch": one.get("torch"), **one.get("distributions", {})}
        for one in versions
    ]
    told = _told(found) or _told([{"platform": one.get("platform")} for one in versions])
    if not told:
        return ""
    return f"The runs were made with different versions ({told}): differences may be due to these."


def _told(found: Sequence[Mapping[str, Any]]) -> str:
    """List what differs, with its values: ``torch: 2.1, 2.2; bfl-best: absent, 0.1``."""
    names = dict.fromkeys(name for one in found for name in one)
    known = {k: dict.fromkeys(str(one.get(k) or "absent") for one in found) for k in names}
    return "; ".join(f"{name}: {', '.join(v)}" for name, v in known.items() if len(v) > 1)
