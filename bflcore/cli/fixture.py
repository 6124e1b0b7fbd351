"""Pytest fixtures: import the ones you need in your ``conftest.py``.

from bflcore.cli.fixture import bfl
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

__all__ = ["bfl"]


@pytest.fixture
def bfl(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[object, str, str]]:
    """Run a command in an empty folder; return exit status, standard output and error."""
    from bflcore.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return run
