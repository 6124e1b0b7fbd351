"""The hooks: how a distribution contributes components.

A plugin is a module named by an entry point of the group ``bfl``. It implements any of the hooks
below; each takes no arguments and yields component classes. A complete plugin:

    # pyproject.toml
    # [project.entry-points.bfl]
    # mine = "bfl_mine.plugin"

    # bfl_mine/plugin.py
    from bflcore import Aggregator, Map, Method, component, hookimpl, option

    @component
    class Midrange(Aggregator):
        \"\"\"Fuse each field to the middle between its smallest and its largest value.\"\"\"

        name = "midrange"
        reference = "new"
        families = ("point", "gaussian")
        weighs = False
        ignores_weights_because = "only the two clients at the ends count"
        tags = frozenset({"keeps-variance"})

        spread: str = option("middle", "fused variance", choices=("middle", "largest"))

        def fuse(self, posteriors, weights, prior):
            self.check(posteriors, weights, prior)
            fused = posteriors.map(lambda field: (field.amin(0) + field.amax(0)) / 2).pack()
            if self.spread == "largest" and "variance" in fused:
                fused["variance"] = posteriors.variance.amax(0)
            return prior.unpack(fused)

    class FedMidrange(Method):
        \"\"\"Train point estimates and fuse them by their midrange.\"\"\"

        name = "fed-midrange"
        reference = "new"
        inference = Map(local_epochs=2)
        aggregator = Midrange()
        settings = {"rounds": 10}

    @hookimpl
    def bfl_aggregators():
        yield Midrange

    @hookimpl
    def bfl_methods():
        yield FedMidrange

``bfl new-plugin`` writes a whole distribution; docs/writing-plugins.md is the guide. A component
that lacks what its kind must declare makes its plugin broken, with the reason, and nothing else.

Declaring a component must not import torch: write ``torch = lazy("torch")`` (see `bflcore.lazy`),
which imports it when it is first used, or import it inside the methods that need it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from bflcore.aggregation import Aggregator
    from bflcore.data.base import DataSource
    from bflcore.data.label_noise import LabelNoise
    from bflcore.data.partition import Partitioner
    from bflcore.engines.base import Engine
    from bflcore.hyper import HyperUpdate
    from bflcore.inference.base import LocalInference
    from bflcore.methods import Method
    from bflcore.models.base import Model
    from bflcore.posteriors import Posterior
    from bflcore.problem.calibration.base import Calibrator
    from bflcore.problem.likelihoods import Likelihood
    from bflcore.registry.command import Command
    from bflcore.registry.loggers import Logger
    from bflcore.weighting import Weighting

__all__ = ["GROUP", "hookimpl", "hookspec"]

GROUP = "bfl"

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@hookspec
def bfl_methods() -> Iterable[type[Method]]:
    """Yield methods: named recipes of parts, with a citation."""


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
def bfl_models() -> Iterable[type[Model]]:
    """Yield models: networks that declare their head."""


@hookspec
def bfl_likelihoods() -> Iterable[type[Likelihood]]:
    """Yield likelihoods: how a network's outputs explain the targets."""


@hookspec
def bfl_engines() -> Iterable[type[Engine]]:
    """Yield engines: where clients run."""


@hookspec
def bfl_datasets() -> Iterable[type[DataSource]]:
    """Yield data sets: what ``--data NAME`` loads."""


@hookspec
def bfl_partitioners() -> Iterable[type[Partitioner]]:
    """Yield partitions: which sample goes to which client."""


@hookspec
def bfl_label_noises() -> Iterable[type[LabelNoise]]:
    """Yield label noises: which training labels are made wrong."""


@hookspec
def bfl_calibrators() -> Iterable[type[Calibrator]]:
    """Yield calibrators: what is corrected, or promised, after training."""


@hookspec
def bfl_loggers() -> Iterable[type[Logger]]:
    """Yield loggers: where metrics go besides ``metrics.jsonl``."""


@hookspec
def bfl_commands() -> Iterable[type[Command]]:
    """Yield commands: what ``bfl NAME`` does besides the core's own."""
