"""The report's section on single test samples: the least sure ones and the surest errors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bflcore.report.reading import Run

__all__ = ["section"]

PNG = re.compile(r"iVBORw0KGgo[A-Za-z0-9+/]*={0,2}")  # the first bytes of every PNG in base64
LONGEST = 60_000  # characters of a picture
MOST = 12  # samples of each kind
KINDS = {
    "unsure": ("Least sure", "Those with the largest entropy of the prediction."),
    "wrong": (
        "Surest errors",
        "Wrong predictions, the most probable first.",
    ),
}


def section(run: Run) -> dict[str, Any]:
    """Return both kinds of samples; no kinds if the run kept none."""
    kinds = [
        {
            "title": title,
            "sentence": sentence,
            "samples": [_card(run, one) for one in run.samples.get(name, [])[:MOST]],
        }
        for name, (title, sentence) in KINDS.items()
    ]
    return {
        "kinds": [kind for kind in kinds if kind["samples"]],
        "examined": int(run.samples.get("examined", 0)),
    }


def _card(run: Run, sample: dict[str, Any]) -> dict[str, Any]:
    picture = str(sample.get("picture", ""))
    safe = len(picture) <= LONGEST and PNG.fullmatch(picture)
    label = int(sample["label"])
    return {
        "picture": picture if safe else "",
        "client": run.client(int(sample["client"])),
        "number": int(sample["sample"]),
        "label": run.class_name(label),
        "entropy": f"{float(sample['entropy']):.2f}",
        "predicted": [
            {
                "class": run.class_name(int(found)),
                "right": int(found) == label,
                "percent": round(100 * float(p)),
            }
            for found, p in sample["predicted"][:3]
        ],
    }
