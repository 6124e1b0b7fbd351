"""Loggers: where the metrics of evaluated rounds are written besides ``metrics.jsonl``."""

from __future__ import annotations

import abc
import csv
import importlib.util
from pathlib import Path
from typing import Any, ClassVar

from bflcore.errors import OptionError
from bflcore.files import replace_file, write_text
from bflcore.options import Component, component

__all__ = ["CSV", "Logger", "MLflow", "TensorBoard", "flat"]


class Logger(Component, abc.ABC):
    """Base of loggers, chosen with ``--log NAME``."""

    kind: ClassVar[str] = "logger"

    def check(self) -> None:
        """Raise `OptionError` if a package is missing, with the command that installs it."""

    @abc.abstractmethod
    def log(self, folder: Path, record: dict[str, Any]) -> None:
        """Log one evaluated round (a line of ``metrics.jsonl``) of the run in `folder`."""

    def rewind(self, folder: Path, round: int) -> None:
        """Remove what was logged after a round, because the run continues from that round.

        Default: do nothing (for back ends that overwrite repeated steps).
        """


@component
class CSV(Logger):
    """Add each evaluated round to ``metrics.csv``, one column per metric, for spreadsheets."""

    name = "csv"

    def log(self, folder: Path, record: dict[str, Any]) -> None:
        """Add one row; a new metric gets a column that is empty in earlier rows."""
        self._write(folder, [*self._read(folder), flat(record)])

    def rewind(self, folder: Path, round: int) -> None:
        """Remove the rows after a round."""
        if rows := self._read(folder):
            self._write(folder, [row for row in rows if float(row["round"]) <= round])

    def _read(self, folder: Path) -> list[dict[str, Any]]:
        path = folder / "metrics.csv"
        if not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _write(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        columns = dict.fromkeys(name for row in rows for name in row)
        with (
            replace_file(folder / "metrics.csv") as aside,
            aside.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, list(columns))
            writer.writeheader()
            writer.writerows(rows)


@component
class TensorBoard(Logger):
    """Write each evaluated round as an event file in the run's folder ``tensorboard``."""

    name = "tensorboard"

    def check(self) -> None:
        """Require the package tensorboard."""
        _require("tensorboard", self.name)

    def log(self, folder: Path, record: dict[str, Any]) -> None:
        """Write scalars by their dotted names, at the round's number."""
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder / "tensorboard")) as writer:
            for name, value in flat(record).items():
                writer.add_scalar(name, value, record["round"])


@component
class MLflow(Logger):
    """Send each evaluated round to an MLflow tracking server or file store.

    MLflow reads the address from MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.
    The MLflow run's id is stored in the folder, so that a resumed run continues the same one.
    """

    name = "mlflow"

    def check(self) -> None:
        """Require the package mlflow, or its small variant mlflow-skinny."""
        _require("mlflow", self.name)

    def log(self, folder: Path, record: dict[str, Any]) -> None:
        """Log metrics at the round's number, in the MLflow run of this folder."""
        import mlflow

        known = folder / "mlflow.txt"
        run_id = known.read_text(encoding="utf-8") if known.exists() else None
        with mlflow.start_run(run_id=run_id, run_name=folder.name) as run:
            if run_id is None:
                write_text(known, run.info.run_id)
                mlflow.log_artifact(str(folder / "experiment.toml"))
            mlflow.log_metrics(flat(record), step=record["round"])


def _require(package: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise OptionError(
            f"--log: {name} needs the package {package}, which is not installed; "
            f"pip install 'bflcore[{name}]', or leave {name} out"
        )


def flat(record: dict[str, Any]) -> dict[str, float]:
    """Return a record's numbers under dotted names: ``personal.accuracy.mean``."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            numbers |= {f"{key}.{name}": number for name, number in flat(value).items()}
        elif isinstance(value, int | float):
            numbers[key] = value
    return numbers
