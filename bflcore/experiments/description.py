"""What a run must know of its data to be used without them: the file ``data.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs

from bflcore.data.base import Dataset
from bflcore.data.partition import Partition
from bflcore.errors import RunError
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import numpy as np

    from bflcore.experiments.resolve import Experiment
else:
    np = lazy("numpy")

__all__ = ["FILE", "Client", "Description"]

FILE = "data.json"
FORMAT = 1


@attrs.frozen
class Client:
    """One client: the owner's id (else the client's number), and how many samples it has."""

    id: int | str
    train: int = 0
    test: int = 0
    validation: int = 0
    calibration: int = 0


@attrs.frozen
class Description:
    """The form of the data, and who owns them; no sample.

    `byte` is the byte that stands for 1 if samples are given as bytes (None: as real numbers);
    `outputs` counts classes or targets; the last `novel` clients are held out of training.
    """

    task: str
    shape: tuple[int, ...]
    byte: float | None
    input_range: str
    standardise: bool
    outputs: int
    classes: tuple[str, ...]
    clients: tuple[Client, ...]
    novel: int = 0

    @classmethod
    def of(cls, experiment: Experiment, dataset: Dataset, partition: Partition) -> Self:
        """Describe divided data."""
        labels = range(dataset.classes if dataset.task == "classification" else 0)
        bytes_given = dataset.x.dtype == np.uint8 or dataset.unit != 1
        return cls(
            dataset.task,
            tuple(map(int, dataset.x.shape[1:])),
            float(dataset.unit) if bytes_given else None,
            experiment.data.input_range,
            dataset.standardise,
            dataset.outputs,
            dataset.class_names or tuple(map(str, labels)),
            _clients(experiment, dataset, partition),
            experiment.data.novel_clients,
        )

    @classmethod
    def from_json(cls, values: Any, where: object) -> Self:
        """Rebuild a description from the values of `as_json`.

        Raises `RunError` naming `where` if they are not one.
        """
        try:
            given = dict(values)
            if given.pop("format") != FORMAT:
                raise RunError(f"{where} has another format; it is of another version of bflcore")
            clients = tuple(Client(**client) for client in given.pop("clients"))
            lists: dict[str, Any] = {name: tuple(given.pop(name)) for name in ("shape", "classes")}
            return cls(**given, **lists, clients=clients)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{where} does not describe the data of a run ({type(error).__name__}: {error})"
            ) from None

    @classmethod
    def read(cls, run: Path) -> Self:
        """Read ``data.json`` of a run directory. Raises `RunError` without a valid one."""
        path = run / FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(
                f"{path} is missing: the run was started by an earlier version; run it again: "
                f"bfl run {run / 'experiment.toml'}"
            ) from None
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read ({error}); start the run again") from None
        return cls.from_json(values, path)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"format": FORMAT, **attrs.asdict(self)}

    def only(self, number: int) -> Description:
        """Return the description without the ids and sample counts of the other clients."""
        clients = enumerate(self.clients)
        kept = tuple(one if i == number else Client(i) for i, one in clients)
        return attrs.evolve(self, clients=kept)

    def without_samples(self) -> tuple[Dataset, Partition]:
        """Return data of this form without a sample, divided among the clients."""
        classification = self.task == "classification"
        y: Any = np.zeros(0, np.int64) if classification else np.zeros((0, self.outputs), "f4")
        x: Any = np.zeros((0, *self.shape), np.float32)
        dataset = Dataset(
            "data",
            "classification" if classification else "regression",
            x,
            y,
            self.outputs if classification else 0,
            standardise=self.standardise,
        )
        nothing = tuple(np.empty(0, np.int64) for _ in range(max(1, len(self.clients))))
        return dataset, Partition(nothing, nothing)


def _clients(experiment: Experiment, dataset: Dataset, partition: Partition) -> tuple[Client, ...]:
    owned = experiment.partition.by_owner and dataset.client is not None
    found = []
    for number, train in enumerate(partition.train):
        test = partition.test[number]
        held: list[Any] = [
            parts[number] if parts else ()
            for parts in (partition.validation, partition.calibration)
        ]
        own = [*train[:1], *held[0][:1], *(() if partition.held_out else test[:1])]
        owner = number
        if owned and own and dataset.client is not None:
            owner = int(dataset.client[own[0]])
        found.append(Client(owner, len(train), len(test), *map(len, held)))
    return tuple(found)
