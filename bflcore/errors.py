"""The one exception hierarchy.

Every message says what is wrong, where, what was given, what is allowed and the next step, in one
line. The command line prints that line alone and exits with status 2.
"""

from __future__ import annotations

import difflib
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol

__all__ = [
    "BflError",
    "ClientError",
    "DataError",
    "IncompatibleError",
    "OptionError",
    "PluginError",
    "RoundError",
    "RunError",
    "RunWarning",
    "WriteError",
    "blamed",
    "described",
    "nearest",
    "unknown",
]

CORE = Path(__file__).parent
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


class Part(Protocol):
    """What an error says of a component."""

    kind: ClassVar[str]
    name: ClassVar[str]


class BflError(Exception):
    """Base of everything that bflcore raises on purpose."""


class OptionError(BflError):
    """A value, a name or an option that the user gave is not allowed."""


class IncompatibleError(BflError):
    """Two chosen parts do not fit; the message names the parts that would."""


class PluginError(BflError):
    """A plugin is broken; the message names its distribution."""


class DataError(BflError):
    """Data is missing, malformed, or cannot be divided as asked."""


class RunError(BflError):
    """A run directory cannot be written, read or continued."""


class WriteError(RunError):
    """A file cannot be written: there is no room, or no permission."""


class RunWarning(UserWarning):
    """Something about a run that its user should know; the run goes on."""


class RoundError(RunError):
    """A round cannot be finished; the run can go on from its last checkpoint."""


class ClientError(BflError):
    """A client's work failed: who, at which stage, why.

    `trace` is the traceback from where the client worked, for ``--debug``.
    """

    def __init__(self, client: int, stage: str, reason: str, trace: str = "") -> None:
        super().__init__(f"client {client} failed in {stage}: {reason}")
        self.client = client
        self.stage = stage
        self.reason = reason
        self.trace = trace

    def __reduce__(self) -> tuple[type[ClientError], tuple[int, str, str, str]]:
        return type(self), (self.client, self.stage, self.reason, self.trace)


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return ``" (did you mean X?)"`` for the closest allowed name, or an empty string."""
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def unknown(what: str, given: str, allowed: Iterable[str], next_step: str = "") -> OptionError:
    """Return the error for a name that does not exist, with the nearest right one."""
    names = sorted(allowed)
    listed = ", ".join(names) if names else "none is installed"
    step = f"; {next_step}" if next_step else ""
    return OptionError(f"unknown {what} {given!r}{nearest(given, names)}; allowed: {listed}{step}")


def described(error: BaseException, part: object) -> str:
    """Return an exception in one line, with the innermost line of code that its author can change.

    ``KeyError: 'mean' at mine/rule.py:42``: a line of the part's own package, or of a file that is
    not part of a library.
    """
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - the exception cannot even be printed
        text = ""
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    cls = part if isinstance(part, type) else type(part)
    package = sys.modules.get(cls.__module__.partition(".")[0])
    homes = [Path(one) for one in getattr(package, "__path__", [])]
    frames = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    own = [
        (path, line)
        for path, line in frames
        if not path.is_relative_to(CORE)
        and (any(map(path.is_relative_to, homes)) or not any(map(path.is_relative_to, LIBRARIES)))
    ]
    for path, line in (own or frames)[-1:]:
        said += f" at {path.parent.name}/{path.name}:{line}"
    return said


@contextmanager
def blamed(part: Part, round: int) -> Iterator[None]:
    """Raise `RoundError` with the part's name, file and line for whatever the part raises.

    What bflcore raises on purpose passes.
    """
    try:
        yield
    except BflError:
        raise
    except Exception as error:
        raise RoundError(
            f"round {round}: {part.kind} {part.name} failed: {described(error, part)}"
        ) from error
