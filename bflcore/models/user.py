"""A user's own network: ``--model module:factory``.

The factory is called with the shape of a sample and the number of outputs:

    # mynets.py
    def build(input_shape, outputs):
        network = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))
        network.head = "1"  # optional: the module path of the decision layer
        return network
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from bflcore.errors import OptionError, nearest
from bflcore.lazy import lazy
from bflcore.models.base import Model

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bflcore.models import networks
else:
    torch = lazy("torch")
    nn = lazy("torch.nn")
    networks = lazy("bflcore.models.networks")

__all__ = ["UserModel", "load_factory"]

# Some modules call sys.exit when imported; that must not end the program.
FAILURES = (Exception, SystemExit)


@attrs.frozen
class UserModel(Model):
    """Build the network with the user's own factory (see `load_factory`)."""

    factory: Callable[[tuple[int, ...], int], Any]

    def network(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Call the factory and test the network on two samples.

        Raises `OptionError` if the factory fails, if it does not return a network with parameters,
        or if the outputs have the wrong shape.
        """
        try:
            made = self.factory(input_shape, outputs)
        except FAILURES as error:
            raise OptionError(
                f"model {self.name} failed for input_shape={input_shape}, outputs={outputs}: "
                f"{_cause(error)}; try it in Python with these arguments"
            ) from error
        if not isinstance(made, nn.Module):
            raise OptionError(
                f"model {self.name} returned {type(made).__name__}; "
                "allowed: a torch.nn.Module; build the network and return it"
            )
        # A bare linear layer is wrapped, so that its head has a module path.
        network: nn.Module = nn.Sequential(made) if isinstance(made, nn.Linear) else made
        self._try(network, input_shape, outputs)
        return network

    def head(self, network: nn.Module) -> str:
        """Return the head that the network declares, else the path of the last linear layer.

        The attribute ``head`` is a module path, or the head itself. Raises `OptionError` if it does
        not name a layer with parameters.
        """
        declared = getattr(network, "head", None)
        if isinstance(declared, nn.Module) and _trains(declared):
            return "head"
        if not isinstance(declared, str):
            return super().head(network)
        layers = [path for path, layer in network.named_modules() if path and _trains(layer)]
        if declared not in layers:
            raise OptionError(
                f"model {self.name} declares the head {declared!r}, which is not a layer with "
                f"parameters{nearest(declared, layers)}; allowed: {', '.join(layers)}"
            )
        return declared

    def _try(self, network: nn.Module, input_shape: tuple[int, ...], outputs: int) -> None:
        if not _trains(network):
            raise OptionError(
                f"model {self.name} has no parameters to learn; register its layers as "
                "attributes of the module, lists of layers as nn.ModuleList"
            )
        samples = torch.zeros(2, *input_shape, dtype=next(network.parameters()).dtype)
        try:
            # `check_network` checks on real samples whether it draws random numbers.
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                result = network(samples)
        except Exception as error:
            raise OptionError(
                f"model {self.name} cannot run on samples of shape {tuple(samples.shape)}: "
                f"{_cause(error)}; fit the network to input_shape={input_shape}"
            ) from error
        shape = getattr(result, "shape", type(result).__name__)
        if shape != (2, outputs):
            given = shape if isinstance(shape, str) else tuple(shape)
            raise OptionError(
                f"model {self.name} returned {given} for 2 samples of shape {input_shape}; "
                f"allowed: {(2, outputs)}, one row of outputs per sample"
            )

    def __reduce__(self) -> tuple[Callable[[str], Model], tuple[str]]:
        return load_factory, (self.name,)


def load_factory(spec: str) -> Model:
    """Return the model that ``module:factory`` names.

    The module is looked up in the current folder, then among the installed packages; the folder
    stays on ``sys.path``, so that worker processes find the module too. Raises `OptionError` if
    there is no such factory.
    """
    module_name, _, path = spec.partition(":")
    if not (module_name and path):
        raise OptionError(
            f"model {spec!r} is not allowed; allowed: module:factory, such as mynets:build "
            "for the function build in mynets.py; bfl list model shows the models by name"
        )
    found = _find(spec, _import(spec, module_name), path)

    class NamedUserModel(UserModel):
        """Build the network with the user's own factory."""

        name = spec

    return NamedUserModel(found)


def _import(spec: str, name: str) -> ModuleType:
    folder = str(Path.cwd())
    if not {"", folder} & set(sys.path):
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except FAILURES as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{name}.".startswith(f"{absent}."):
            reason = (
                f"there is no module {absent} in {folder} or among the installed packages; "
                "name it as Python imports it, with dots and without .py"
            )
        else:
            reason = f"importing {name} failed: {_cause(error)}; try python -c 'import {name}'"
        raise OptionError(f"model {spec}: {reason}") from error


def _find(spec: str, module: ModuleType, name: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        own = sorted(
            key
            for key, value in vars(module).items()
            if callable(value)
            and not key.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        )
        raise OptionError(
            f"model {spec}: module {module.__name__} ({module.__file__}) has no {name!r}"
            f"{nearest(name, own)}; allowed: {', '.join(own) or 'none, it defines no function'}"
        )
    found = getattr(module, name)
    if not callable(found):
        raise OptionError(
            f"model {spec}: {name} is {type(found).__name__}, not callable; "
            "allowed: a function of (input_shape, outputs) that returns a torch.nn.Module"
        )
    factory: Callable[..., Any] = found
    return factory


def _trains(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _cause(error: BaseException) -> str:
    """Describe an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
