"""Flags of a run that takes a second, and what it recorded."""

import json

QUICK = (
    "--data",
    "synthetic",
    "--partition",
    "natural",
    "--clients",
    "3",
    "--rounds",
    "2",
    "--eval-every",
    "1",
    "--local-epochs",
    "1",
    "--workers",
    "1",
    "-o",
    "dataset.owners=4",
    "-o",
    "dataset.samples=30",
)


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
