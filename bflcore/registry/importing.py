"""Importing a stranger's module: whatever it prints, however long it takes, it is named.

What a module prints while it is imported goes to standard error, so that ``--json`` stays JSON. A
module that ends the process itself (``os._exit``, a crash in C) cannot be stopped or named.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from bflcore.errors import PluginError

__all__ = ["PATIENCE", "guarded"]

PATIENCE = 10.0  # seconds after which a person is told what is being waited for


@contextmanager
def guarded(plugin: str, module: str) -> Iterator[None]:
    """Run a plugin's code: its output goes to standard error, and if it hangs it is named.

    Nothing is stopped: a slow import may be honest, and half an import does harm. Raises
    `PluginError` if the module raises `KeyboardInterrupt`; where the user did, that passes.
    """
    text = (
        f"waiting for plugin {plugin}: {module} has been loading for {PATIENCE:g} s; if it hangs, "
        f"press Ctrl-C and uninstall it: pip uninstall {plugin}\n"
    )
    watch = threading.Timer(PATIENCE, sys.stderr.write, (text,))
    watch.daemon = True
    watch.start()
    pressed: list[int] = []
    try:
        with redirect_stdout(sys.stderr), _noted(pressed):
            yield
    except KeyboardInterrupt:
        if not pressed and threading.current_thread() is threading.main_thread():
            raise PluginError("it raised KeyboardInterrupt while it was loaded") from None
        sys.stderr.write(f"interrupted while plugin {plugin} ({module}) was loading\n")
        raise
    finally:
        watch.cancel()


@contextmanager
def _noted(pressed: list[int]) -> Iterator[None]:
    """Note whether it is the user who interrupts: what a module raises looks the same."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, _: object) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
