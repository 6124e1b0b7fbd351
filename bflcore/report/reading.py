"""Reading run directories for reports and comparisons."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from bflcore.errors import RunError
from bflcore.experiments.integrity import read_json, read_lines

__all__ = ["Run", "read_run"]


@attrs.frozen
class Run:
    """A finished run, as its folder describes it."""

    path: Path
    experiment: dict[str, Any]
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    evaluation: dict[str, Any]
    environment: dict[str, Any]

    @property
    def label(self) -> str:
        """The folder's name, by which a comparison tells runs apart."""
        return self.path.resolve().name

    @property
    def classifies(self) -> bool:
        """Whether the task is classification."""
        return not any("personal.rmse" in record for record in self.records)


def read_run(path: Path) -> Run:
    """Read a run directory. Raises `RunError` naming the file that is missing or malformed."""
    if not (path / "experiment.toml").is_file():
        raise RunError(f"{path} is not a run directory; give the folder that bfl run wrote")
    return Run(
        path,
        _read(path / "experiment.toml", _toml),
        _read(path / "metrics.jsonl", _evaluated),
        _read(path / "summary.json", read_json),
        _read(path / "evaluation.json", read_json),
        _read(path / "environment.json", read_json),
    )


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _evaluated(path: Path) -> list[dict[str, Any]]:
    found = read_lines(path)
    if not found:
        raise ValueError("no round has been evaluated")
    return found


def _read(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except FileNotFoundError:
        raise RunError(
            f"{path} is missing: the run has not finished; wait for it, or continue it with: "
            f"bfl resume {shlex.quote(str(path.parent))}"
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); start the run again") from None
