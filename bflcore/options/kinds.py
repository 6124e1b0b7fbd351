"""The kinds of component, in one table: whatever lists kinds is derived from it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import attrs

from bflcore.errors import unknown

__all__ = ["CONFIGURABLE", "FITTED", "KINDS", "PARTS", "Kind", "kind_called"]


def _derived(name: Callable[[Kind], str]) -> str:
    """Declare a name that follows from others unless a row of the table gives it."""
    field: str = attrs.field(default=attrs.Factory(name, takes_self=True))
    return field


@attrs.frozen(kw_only=True)
class Kind:
    """One kind of component.

    `base` is the public class from which its components derive, `plural` its attribute of the
    registry, and `hook` the function by which a plugin contributes components.
    """

    name: str = attrs.field(kw_only=False)
    base: str = attrs.field(kw_only=False)
    # For the parts of a run: what they are. ``--NAME`` chooses one, the table ``[NAME]`` holds its
    # options.
    part: str = ""
    default: str = ""  # the part that is used unless one is chosen
    setting: str = ""  # the data setting that chooses it
    listed: str = ""  # the setting of the run that names any number of them
    fitted: bool = False  # must support the inference's posterior family
    plural: str = _derived(lambda kind: f"{kind.attribute}s")
    hook: str = _derived(lambda kind: f"bfl_{kind.plural}")
    checks: str = _derived(lambda kind: f"{kind.attribute}_checks")  # module of bflcore.testing

    @property
    def base_class(self) -> type:
        """The class of which every component of this kind is a subclass."""
        found: type = getattr(import_module("bflcore"), self.base)
        return found

    @property
    def attribute(self) -> str:
        """The name as a Python identifier."""
        return self.name.replace("-", "_")


UPDATE = "hyperparameter update (the next round's prior)"

KINDS = (
    Kind("method", "Method"),
    Kind("posterior", "Posterior"),
    Kind("inference", "LocalInference", part="local inference"),
    Kind("aggregator", "Aggregator", part="rule that fuses the clients' posteriors", fitted=True),
    Kind("weighting", "Weighting", part="weights of the clients in the fusion", fitted=True),
    Kind("hyper", "HyperUpdate", plural="hyper_updates", part=UPDATE, fitted=True),
    Kind("model", "Model", part="network, or your own module:factory", default="mlp"),
    Kind("likelihood", "Likelihood", part="likelihood of the targets"),
    Kind("engine", "Engine", part="engine that runs the clients", default="local"),
    Kind("dataset", "DataSource", setting="data", checks=""),
    Kind("partition", "Partitioner", hook="bfl_partitioners", setting="partition"),
    Kind("label-noise", "LabelNoise", setting="label_noise"),
    Kind("calibrator", "Calibrator", listed="calibrate"),
    Kind("logger", "Logger", listed="log", checks=""),
    Kind("command", "Command", checks=""),
)

PARTS = tuple(kind.name for kind in KINDS if kind.part)
FITTED = tuple(kind.name for kind in KINDS if kind.fitted)
CONFIGURABLE = tuple(kind.name for kind in KINDS if kind.part or kind.setting)  # by -o PART.OPTION


def kind_called(name: str) -> Kind:
    """Return the kind of this name. Raises `OptionError` with the nearest one."""
    found = next((kind for kind in KINDS if kind.name == name), None)
    if found is None:
        raise unknown("kind", name, [kind.name for kind in KINDS], "bfl list")
    return found
