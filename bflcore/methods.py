"""Methods: named recipes of parts, with a citation."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from bflcore.aggregation import Average
from bflcore.errors import OptionError, unknown
from bflcore.hyper import Fixed
from bflcore.inference.point import Map
from bflcore.inference.variational import Variational
from bflcore.options import Component, build, options_of
from bflcore.options.kinds import KINDS, PARTS
from bflcore.options.settings import DataSettings, RunSettings
from bflcore.weighting import Examples

if TYPE_CHECKING:
    from bflcore.aggregation import Aggregator
    from bflcore.engines.base import Engine
    from bflcore.hyper import HyperUpdate
    from bflcore.inference.base import LocalInference
    from bflcore.models.base import Model
    from bflcore.problem.likelihoods import Likelihood
    from bflcore.weighting import Weighting

__all__ = ["FedAvg", "FedVI", "Method"]


class Method(Component, abc.ABC):
    """Base of methods: a choice of parts, and the settings that the method recommends.

        class BPFed(Method):
            name = "bpfed"
            inference = ReinforcedVariational(initial_sigma=0.2)
            weighting = Equal()
            share = "body"
            settings = {"rounds": 300}

    `settings` holds options of `RunSettings` or `DataSettings`. A file and flags override options
    and settings; choosing another part drops the method's options for it. Raises `OptionError`
    where the class is defined if a name or a value is wrong.
    """

    kind: ClassVar[str] = "method"
    inference: ClassVar[LocalInference]
    aggregator: ClassVar[Aggregator] = Average()
    weighting: ClassVar[Weighting] = Examples()
    hyper: ClassVar[HyperUpdate] = Fixed()
    model: ClassVar[Model | None] = None
    likelihood: ClassVar[Likelihood | None] = None
    engine: ClassVar[Engine | None] = None
    share: ClassVar[str] = "all"
    settings: ClassVar[Mapping[str, object]] = MappingProxyType({})

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        try:
            _check(cls)
        except OptionError as error:
            raise OptionError(f"method {cls.__dict__.get('name', cls.__name__)}: {error}") from None
        cls.settings = MappingProxyType(dict(cls.settings))

    @classmethod
    def parts(cls) -> dict[str, Component]:
        """Return the parts that the method chooses, by kind."""
        return {kind: part for kind in PARTS if (part := getattr(cls, kind)) is not None}


ATTRIBUTES = ("name", "aliases", "reference", "expected_failures", *PARTS, "share", "settings")


def _check(method: type[Method]) -> None:
    own = vars(method)
    for name, value in own.items():
        written = not isinstance(value, FunctionType | classmethod | staticmethod | property)
        if written and not name.startswith("_") and name not in ATTRIBUTES:
            raise unknown("attribute", name, ATTRIBUTES)
    for kind in KINDS:
        part = own.get(kind.name) if kind.part else None
        if part is not None and not (isinstance(part, Component) and part.kind == kind.name):
            called = part.__name__ if isinstance(part, type) else repr(part)
            hint = f"; write {called}()" if isinstance(part, type) else ""
            raise OptionError(
                f"{kind.name}: {called} is not allowed; allowed: an instance of "
                f"bflcore.{kind.base}{hint}"
            )
    if "name" in own and not hasattr(method, "inference"):
        raise OptionError("inference is missing; add inference = Map() or another one")
    if "share" in method.settings:
        raise OptionError(f'settings: write share = "{method.settings["share"]}" beside them')
    settings = {**method.settings, "share": method.share}
    tables = {cls: {o.name for o in options_of(cls)} for cls in (RunSettings, DataSettings)}
    known = set().union(*tables.values())
    for name in settings:
        if name not in known:
            raise unknown("setting", name, known)
    for cls, names in tables.items():
        build(cls, {k: v for k, v in settings.items() if k in names}, "settings")


class FedAvg(Method):
    """Train one shared point estimate by federated averaging."""

    name = "fedavg"
    reference = "McMahan et al. 2017, Algorithm 1"
    inference = Map()


class FedVI(Method):
    """Train one shared mean-field Gaussian under a fixed prior; fuse it by any rule.

    The options are the study's, but for the prior, which it does not print: it is chosen on
    validation samples (docs/results/defaults.md). `local-reparameterisation` is the faster
    estimator.
    """

    name = "fedvi"
    reference = "Fischer et al. 2024"
    inference = Variational(estimator="flipout", prior_sigma=10.0, lr_decay=0.04, lr_decay_after=50)
