"""The aggregators that are installed here, in every variant of their options that matters."""

from __future__ import annotations

import attrs

from bflcore.registry.loading import load_registry

VARIANTS = {
    "average": [{"on": "variance"}, {"on": "std"}],
    "trimmed-mean": [{"fraction": 0.0}, {"fraction": 0.1}, {"fraction": 0.4}],
    "weight-consolidation": [{"floor": 0.0}, {"floor": 1.0}],
}


def rules():
    """Return an instance of every registered aggregator and variant."""
    parts = load_registry().aggregators.values()
    return [part(**options) for part in parts for options in VARIANTS.get(part.name, [{}])]


def rule(name):
    """Return a registered aggregator with its default options."""
    return load_registry().aggregators[name]()


def label(thing):
    """Name a rule (with its options) or a law in the ids of tests."""
    options = (
        attrs.asdict(thing).values() if attrs.has(type(thing)) and hasattr(thing, "fuse") else ()
    )
    return "-".join([thing.name.replace(" ", "_"), *map(str, options)])
