"""``bfl matrix``: which parts fit together."""

from __future__ import annotations

import json
from itertools import product

import click

from bflcore.cli.columns import columns
from bflcore.experiments.compatibility import FITTED, fits
from bflcore.registry.loading import Registry, load_registry

__all__ = ["combinations", "commands"]

KINDS = ("inference", *FITTED)


def combinations(registry: Registry) -> list[dict[str, str | bool]]:
    """Return every combination of inference and server parts, with whether it fits."""
    rows = []
    for parts in product(*(registry.of(kind).values() for kind in KINDS)):
        all_fit = all(fits(parts[0], part) for part in parts[1:])
        names = {kind: part.name for kind, part in zip(KINDS, parts, strict=True)}
        rows.append({**names, "fits": all_fit})
    return rows


@click.command("matrix")
@click.option("--json", "as_json", is_flag=True, help="JSON output")
def matrix(as_json: bool) -> None:
    """Show which inferences, aggregators, weightings and hyperparameter updates fit together.

    Per inference, each line shows an aggregator and the hyperparameter updates that fit both; the
    last line shows the weightings that fit the inference.
    """
    registry = load_registry()
    if as_json:
        click.echo(json.dumps(combinations(registry), indent=2))
        return
    for name, inference in registry.inferences.items():
        fitting = {
            kind: [part.name for part in registry.of(kind).values() if fits(inference, part)]
            for kind in FITTED
        }
        hypers = ", ".join(fitting["hyper"])
        rows = [
            (aggregator, hypers if aggregator in fitting["aggregator"] else "-")
            for aggregator in registry.aggregators
        ]
        click.echo(f"{name}  (gives {inference.family})")
        click.echo("\n".join(columns(rows)))
        click.echo(f"  weightings: {', '.join(fitting['weighting'])}")


commands = (matrix,)
