"""The hooks: how a distribution contributes parts.

A plugin is a module named by an entry point of the group ``bfl``. It implements any of the hooks
below; each takes no arguments and yields component classes. A complete plugin:

    # pyproject.toml
    # [project.entry-points.bfl]
    # mine = "bfl_mine.plugin"

    # bfl_mine/plugin.py
    from bflcore import Aggregator, component, hookimpl

    @component
    class Newest(Aggregator):
        \"\"\"Keep the posterior of the last client.\"\"\"

        name = "newest"

        def fuse(self, posteriors, weights, prior):
            return posteriors[-1]

    @hookimpl
    def bfl_aggregators():
        yield Newest

Declaring a part must not import torch: keep numerics in modules of their own and import them
inside the methods that need them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from bflcore.aggregation import Aggregator
    from bflcore.data.base import DataSource
    from bflcore.data.partition import Partitioner
    from bflcore.engines.base import Engine
    from bflcore.hyper import HyperUpdate
    from bflcore.inference.base import LocalInference
    from bflcore.methods import Method
    from bflcore.models.base import Model
    from bflcore.posteriors import Posterior
    from bflcore.registry.command import Command
    from bflcore.registry.loggers import Logger
    from bflcore.weighting import Weighting

__all__ = ["GROUP", "HOOKS", "hookimpl", "hookspec"]

GROUP = "bfl"

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)

# Kind of component -> the hook that yields its classes.
HOOKS = {
    "method": "bfl_methods",
    "posterior": "bfl_posteriors",
    "inference": "bfl_inferences",
    "aggregator": "bfl_aggregators",
    "weighting": "bfl_weightings",
    "hyper": "bfl_hyper_updates",
    "engine": "bfl_engines",
    "dataset": "bfl_datasets",
    "partition": "bfl_partitioners",
    "model": "bfl_models",
    "logger": "bfl_loggers",
    "command": "bfl_commands",
}


@hookspec
def bfl_methods() -> Iterable[type[Method]]:
    """Yield methods: named recipes of parts with defaults and a citation."""


@hookspec
def bfl_posteriors() -> Iterable[type[Posterior]]:
    """Yield posterior families: what a client knows about each parameter."""


@hookspec
def bfl_inferences() -> Iterable[type[LocalInference]]:
    """Yield local inferences: how data turns a prior into a posterior."""


@hookspec
def bfl_aggregators() -> Iterable[type[Aggregator]]:
    """Yield aggregators: how K posteriors become one."""


@hookspec
def bfl_weightings() -> Iterable[type[Weighting]]:
    """Yield weightings: how much each client counts."""


@hookspec
def bfl_hyper_updates() -> Iterable[type[HyperUpdate]]:
    """Yield hyperparameter updates: what the next round's prior is."""


@hookspec
def bfl_engines() -> Iterable[type[Engine]]:
    """Yield engines: where clients run."""


@hookspec
def bfl_datasets() -> Iterable[type[DataSource]]:
    """Yield data sets."""


@hookspec
def bfl_partitioners() -> Iterable[type[Partitioner]]:
    """Yield partitions: which sample goes to which client."""


@hookspec
def bfl_models() -> Iterable[type[Model]]:
    """Yield models: networks that declare their head."""


@hookspec
def bfl_loggers() -> Iterable[type[Logger]]:
    """Yield loggers: where metrics go besides ``metrics.jsonl``."""


@hookspec
def bfl_commands() -> Iterable[type[Command]]:
    """Yield commands: what ``bfl NAME`` does besides the core's own."""
