"""``bfl matrix``: which parts fit together."""

from __future__ import annotations

import json
from itertools import product
from typing import Any, cast

import click

from bflcore.experiments import compatibility
from bflcore.registry.loading import Registry, load_registry

__all__ = ["combinations", "commands"]


def combinations(registry: Registry) -> list[dict[str, str | bool]]:
    """Return every inference x aggregator x weighting x hyper with whether it fits."""
    kinds = ("inference", "aggregator", "weighting", "hyper")
    rows = []
    for parts in product(*(cast("tuple[Any, ...]", registry.all(kind)) for kind in kinds)):
        fits = all(compatibility.fits(parts[0], part) for part in parts[1:])
        names = {kind: part.name for kind, part in zip(kinds, parts, strict=True)}
        rows.append({**names, "fits": fits})
    return rows


@click.command("matrix")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def matrix(as_json: bool) -> None:
    """Show which inference x aggregator x hyper combinations fit.

    A line names the hyperparameter updates that fit an inference and an aggregator; below them
    stand the weightings that fit the inference.
    """
    registry = load_registry()
    rows = combinations(registry)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    inferences = [part.name for part in registry.all("inference")]
    aggregators = [part.name for part in registry.all("aggregator")]
    cells = {
        (i, a): sorted(
            {
                str(r["hyper"])
                for r in rows
                if (r["inference"], r["aggregator"]) == (i, a) and r["fits"]
            }
        )
        for i in inferences
        for a in aggregators
    }
    weightings = {
        i: sorted({str(r["weighting"]) for r in rows if r["inference"] == i and r["fits"]})
        for i in inferences
    }
    width = max(map(len, aggregators))
    for inference in inferences:
        click.echo(f"{inference}  (gives {cast(Any, registry.get('inference', inference)).family})")
        for aggregator in aggregators:
            fitting = cells[inference, aggregator]
            click.echo(f"  {aggregator:<{width}}  {', '.join(fitting) or '-'}")
        click.echo(f"  weightings: {', '.join(weightings[inference])}")


commands = (matrix,)
