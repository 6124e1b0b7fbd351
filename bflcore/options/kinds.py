"""The kinds of component, in one table: whatever lists kinds is derived from it."""

from __future__ import annotations

from importlib import import_module

import attrs

from bflcore.errors import unknown

__all__ = ["CONFIGURABLE", "FITTED", "KINDS", "PARTS", "Kind", "kind_called"]


@attrs.frozen
class Kind:
    """One kind of component.

    `plural` is its attribute of the registry, `base` (``module:Class``) what its components
    derive from, `title` what they are, in words, and `hook` the function by which a plugin
    contributes them.
    """

    name: str
    plural: str
    base: str
    title: str
    hook: str = attrs.field(kw_only=True)
    # One of the parts of a run: ``--NAME`` chooses it, the table ``[NAME]`` holds its options.
    part: bool = attrs.field(default=False, kw_only=True)
    default: str = attrs.field(default="", kw_only=True)  # the part where nobody chooses one
    setting: str = attrs.field(default="", kw_only=True)  # the data setting that chooses it
    fitted: bool = attrs.field(default=False, kw_only=True)  # must know the inference's family
    cites: bool = attrs.field(default=False, kw_only=True)  # its components name a source
    checks: str = attrs.field(default="", kw_only=True)  # module of bflcore.testing

    @property
    def base_class(self) -> type:
        """The class of which every component of this kind is a subclass."""
        module, _, name = self.base.partition(":")
        found: type = getattr(import_module(module), name)
        return found

    @property
    def public_base(self) -> str:
        """The name under which plugins import the base."""
        return f"bflcore.{self.base.partition(':')[2]}"

    @property
    def attribute(self) -> str:
        """The name as a Python identifier."""
        return self.name.replace("-", "_")


KINDS: tuple[Kind, ...] = (
    Kind(
        "method", "methods", "bflcore.methods:Method",
        "named recipe of parts", hook="bfl_methods",
        cites=True, checks="method_checks",
    ),
    Kind(
        "posterior", "posteriors", "bflcore.posteriors:Posterior",
        "posterior family", hook="bfl_posteriors",
        checks="posterior_checks",
    ),
    Kind(
        "inference", "inferences", "bflcore.inference.base:LocalInference",
        "local inference", hook="bfl_inferences",
        part=True, cites=True, checks="inference_checks",
    ),
    Kind(
        "aggregator", "aggregators", "bflcore.aggregation:Aggregator",
        "rule that fuses the clients' posteriors", hook="bfl_aggregators",
        part=True, fitted=True, cites=True, checks="aggregator_checks",
    ),
    Kind(
        "weighting", "weightings", "bflcore.weighting:Weighting",
        "weights of the clients in the fusion", hook="bfl_weightings",
        part=True, fitted=True, cites=True, checks="weighting_checks",
    ),
    Kind(
        "hyper", "hyper_updates", "bflcore.hyper:HyperUpdate",
        "hyperparameter update (the next round's prior)", hook="bfl_hyper_updates",
        part=True, fitted=True, cites=True, checks="hyper_checks",
    ),
    Kind(
        "model", "models", "bflcore.models.base:Model",
        "network, or your own module:factory", hook="bfl_models",
        part=True, default="mlp", checks="model_checks",
    ),
    Kind(
        "likelihood", "likelihoods", "bflcore.problem.likelihoods:Likelihood",
        "likelihood of the targets", hook="bfl_likelihoods",
        part=True, checks="likelihood_checks",
    ),
    Kind(
        "engine", "engines", "bflcore.engines.base:Engine",
        "engine that runs the clients", hook="bfl_engines",
        part=True, default="local", checks="engine_checks",
    ),
    Kind(
        "dataset", "datasets", "bflcore.data.base:DataSource",
        "data set", hook="bfl_datasets",
        setting="data",
    ),
    Kind(
        "partition", "partitions", "bflcore.data.partition:Partitioner",
        "division of the samples among clients", hook="bfl_partitioners",
        setting="partition", checks="partition_checks",
    ),
    Kind(
        "label-noise", "label_noises", "bflcore.data.label_noise:LabelNoise",
        "noise on training labels", hook="bfl_label_noises",
        setting="label_noise", checks="label_noise_checks",
    ),
    Kind(
        "logger", "loggers", "bflcore.registry.loggers:Logger",
        "logger of metrics", hook="bfl_loggers",
    ),
    Kind(
        "command", "commands", "bflcore.registry.command:Command",
        "command of bfl", hook="bfl_commands",
    ),
)  # fmt: skip

PARTS = tuple(kind.name for kind in KINDS if kind.part)
FITTED = tuple(kind.name for kind in KINDS if kind.fitted)
CONFIGURABLE = tuple(kind.name for kind in KINDS if kind.part or kind.setting)  # by -o KIND.OPTION


def kind_called(name: str) -> Kind:
    """Return the kind of this name. Raises `OptionError` with the nearest one."""
    found = next((kind for kind in KINDS if kind.name == name), None)
    if found is None:
        raise unknown("kind", name, [kind.name for kind in KINDS], "bfl list")
    return found
