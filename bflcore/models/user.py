"""A user's own network: ``--model module:factory`` or ``--model path/to/module.py:factory``.

The factory is called with the shape of a sample and the number of outputs:

    # mynets.py
    def build(input_shape, outputs):
        network = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))
        network.head = "1"  # optional: the module path of the decision layer
        return network

The module's file is kept with the run, so that ``bflcore.load`` rebuilds the network elsewhere. It
executes that file: load only runs whose authors you trust.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

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

__all__ = ["UserModel", "file_name", "load_factory"]

# Some modules call sys.exit when imported; that must not end the program.
FAILURES = (Exception, SystemExit)


@attrs.frozen
class UserModel(Model):
    """Build the network with the user's own factory (see `load_factory`)."""

    factory: Callable[[tuple[int, ...], int], Any]
    source: ClassVar[Path | None] = None  # the module's file

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
            looks_up = any(isinstance(one, nn.Embedding) for one in network.modules())
            advice = (
                "samples arrive as real numbers, even codes: look them up as x.long()"
                if looks_up
                else f"fit the network to input_shape={input_shape}"
            )
            raise OptionError(
                f"model {self.name} cannot run on samples of shape {tuple(samples.shape)}: "
                f"{_cause(error)}; {advice}"
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


def load_factory(spec: str, stored: Path | None = None) -> Model:
    """Return the model that ``module:factory`` or ``path.py:factory`` names.

    The module is looked up in the current folder, then among the installed packages; its folder
    stays on ``sys.path``, so that worker processes find the module too. A copy of it in the folder
    `stored` (see `file_name`) takes precedence. Raises `OptionError` if there is no such factory.
    """
    module_name, _, path = spec.rpartition(":")
    if not (module_name and path):
        raise OptionError(
            f"model {spec!r} is not allowed; allowed: module:factory or path.py:factory, such as "
            "mynets:build for the function build in mynets.py; bfl list model shows the models by "
            "name"
        )
    copy = stored / file_name(spec) if stored else None
    if copy and copy.is_file():
        module = _execute(spec, copy)
    elif _is_path(module_name):
        file = Path(module_name).absolute()
        spec, module = f"{file}:{path}", _import_file(spec, file)
    else:
        module = _import(spec, module_name)
    found = _find(spec, module, path)

    class NamedUserModel(UserModel):
        """Build the network with the user's own factory."""

        name = spec
        source = Path(module.__file__) if module.__file__ else None

    return NamedUserModel(found)


def file_name(spec: str) -> str:
    """Return the name of the file of a model's module: ``nets.py`` of ``mine.nets:build``."""
    module = spec.rpartition(":")[0]
    return f"{Path(module).stem if _is_path(module) else module.rpartition('.')[2]}.py"


def _is_path(module: str) -> bool:
    return module.endswith(".py") or "/" in module


def _import_file(spec: str, file: Path) -> ModuleType:
    """Import a file as the module of its name: worker processes can import it, too.

    If it is gone, an installed module of this name is taken (a model may have been moved).
    """
    if not file.is_file():
        try:
            return _import(spec, file.stem)
        except OptionError:
            raise OptionError(
                f"model {spec}: {file} is not a file, and no module {file.stem} is installed; "
                "allowed: a Python module"
            ) from None
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    importlib.invalidate_caches()
    module = _import(spec, file.stem)
    if Path(module.__file__ or "").resolve() != file.resolve():
        raise OptionError(
            f"model {spec}: another module named {file.stem} is installed ({module.__file__}); "
            "rename the file"
        )
    return module


def _execute(spec: str, file: Path) -> ModuleType:
    """Execute a file that is kept with a run, whatever else has its name."""
    name = f"stored_{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None, file  # noqa: S101 - it is a Python file
    assert found.loader is not None, file  # noqa: S101
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except FAILURES as error:
        del sys.modules[name]
        raise OptionError(f"model {spec}: {file} failed: {_cause(error)}") from error
    return module


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
                "name it as Python imports it, or give its path: folder/module.py:factory"
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
