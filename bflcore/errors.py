"""The one exception hierarchy.

Every message says what is wrong, where, what was given, what is allowed and the next step, in one
line. The command line prints that line alone and exits with status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BflError",
    "ClientError",
    "DataError",
    "IncompatibleError",
    "OptionError",
    "PluginError",
    "RoundError",
    "RunError",
    "nearest",
    "unknown",
]


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
