"""Commands: what a plugin adds to the command line."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

from bflcore.options import Component

if TYPE_CHECKING:
    import click

__all__ = ["Command"]


class Command(Component, abc.ABC):
    """Base of a plugin's commands: ``bfl NAME`` runs what `build` returns.

    The first line of a subclass's documentation is its line in ``bfl --help``.
    """

    kind: ClassVar[str] = "command"

    @abc.abstractmethod
    def build(self) -> click.Command:
        """Return the command, or a group of them; imported only when called."""
