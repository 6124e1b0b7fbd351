"""Settings of an experiment that belong to no component: of the run, and of its data."""

from __future__ import annotations

from typing import ClassVar

from bflcore.layout import SHARING
from bflcore.options import Component, component, option

__all__ = ["DataSettings", "RunSettings"]


@component
class RunSettings(Component):
    """Settings of the run itself."""

    kind: ClassVar[str] = "settings"
    name = "run"

    rounds: int = option(100, "rounds of federated training", at_least=1)
    pretrain: float = option(
        0.0,
        "share of all training samples on which the global model is trained before round 1; "
        "the result is round 1's start and prior",
        at_least=0,
        at_most=1,
    )
    cohort: int = option(0, "clients drawn each round; 0: all", at_least=0)
    share: str = option("all", "coordinates that travel", choices=SHARING)
    min_clients: int = option(1, "minimum number of valid client results per round", at_least=1)
    block: int = option(32, "clients whose results are summed first", at_least=1)
    drop_out: float = option(
        0.0, "simulated: chance that a client never replies in a round", at_least=0, at_most=1
    )
    corrupt: float = option(
        0.0, "simulated: chance that a client's result is garbage", at_least=0, at_most=1
    )
    checkpoint_every: int = option(1, "rounds between checkpoints", at_least=1)
    eval_every: int = option(0, "rounds between evaluations; 0: about twenty in all", at_least=0)
    bins: int = option(10, "bins of the calibration errors", at_least=1)
    device: str = option("cpu", "where tensors live: cpu, cuda, cuda:1")
    dtype: str = option("float32", "precision of parameters", choices=("float32", "float64"))
    seed: int = option(0, "owner of every random draw", at_least=0)
    log: tuple[str, ...] = option((), "loggers beside metrics.jsonl, by name: csv, ...")


@component
class DataSettings(Component):
    """Settings of the data and of its division among clients."""

    kind: ClassVar[str] = "settings"
    name = "data"

    data: str = option("mnist5k", "data set, or path/to/data.npz")
    data_dir: str | None = option(None, "folder where the data set lies")
    download: bool = option(False, "fetch the data set if it is absent")
    partition: str = option("iid", "how samples are divided: iid, labels:5, dirichlet:0.5, ...")
    clients: int = option(10, "number of clients", at_least=1)
    novel_clients: int = option(0, "how many of them are held out of training", at_least=0)
    train_per_class: int | None = option(None, "training samples a class and client", at_least=1)
    test_per_class: int | None = option(None, "test samples a class and client", at_least=1)
    test_fraction: float = option(0.2, "share of a client's samples that test", above=0, below=1)
    label_noise: str | None = option(
        None, "wrong training labels, after the split: pair:0.1, symmetric:0.4, ..."
    )
