"""Reading run directories for reports and comparisons."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import attrs

from bflcore.errors import RunError

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
        _parse(path / "experiment.toml", tomllib.loads),
        _parse(path / "metrics.jsonl", _json_lines),
        _parse(path / "summary.json", json.loads),
        _parse(path / "evaluation.json", json.loads),
        _parse(path / "environment.json", json.loads),
    )


def _json_lines(text: str) -> list[Any]:
    if not text:
        raise ValueError("no round has been evaluated")
    return [json.loads(line) for line in text.splitlines()]


def _parse(path: Path, parser: Any) -> Any:
    try:
        return parser(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(
            f"{path} is missing: the run has not finished; wait for it, or continue it with: "
            f"bfl resume {shlex.quote(str(path.parent))}"
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); start the run again") from None
