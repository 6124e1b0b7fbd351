"""Settings of an experiment that do not belong to a component: of the run and of its data."""

from __future__ import annotations

from typing import ClassVar

from bflcore.layout import SHARING
from bflcore.options import Component, component, option

__all__ = ["SETTINGS", "DataSettings", "RunSettings"]


@component
class RunSettings(Component):
    """Settings of the run itself."""

    kind: ClassVar[str] = "settings"
    name = "run"

    rounds: int = option(
        100, "number of rounds of federated training", at_least=1, at_most=1_000_000
    )
    pretrain: float = option(
        0.0,
        "fraction of all training samples used to pre-train the initial model and prior (0 = none)",
        at_least=0,
        at_most=1,
    )
    cohort: int = option(0, "number of clients drawn per round (0 = all)", at_least=0)
    share: str = option("all", "parameters shared with the server", choices=SHARING)
    min_clients: int | None = option(
        None,
        "minimum number of valid client results per round (0 = rounds without any are skipped; "
        "none = 2, but 1 if one client is asked, and 0 with simulated faults)",
        at_least=0,
    )
    trust: float = option(
        30.0,
        "refuse a client result this many times larger than the cohort's median (0 = never)",
        at_least=0,
    )
    block: int = option(32, "number of consecutive clients summed as one block", at_least=1)
    drop_out: float = option(
        0.0, "simulated fault: probability that a client does not reply", at_least=0, at_most=1
    )
    corrupt: float = option(
        0.0, "simulated fault: probability that a client result is invalid", at_least=0, at_most=1
    )
    checkpoint_every: int = option(1, "number of rounds between checkpoints", at_least=1)
    eval_every: int = option(
        0, "number of rounds between evaluations (0 = about 20 evaluations per run)", at_least=0
    )
    eval_clients: int = option(
        200,
        "number of clients in each evaluation but the last, which covers all: a random sample, the "
        "same in all rounds (0 = all)",
        at_least=0,
    )
    keep_samples: str = option(
        "auto",
        "keep a few test samples for the report (auto = those of public data "
        "sets, never of your own data)",
        choices=("auto", "yes", "no"),
    )
    bins: int = option(10, "number of bins of the calibration errors", at_least=1, at_most=1000)
    device: str = option("cpu", "device that holds the tensors: cpu, cuda or cuda:N")
    dtype: str = option("float32", "precision of the parameters", choices=("float32", "float64"))
    seed: int = option(0, "random seed", at_least=0)
    calibrate: tuple[str, ...] = option(
        (),
        "calibrators fitted after training (none = temperature,conformal,ood with "
        "--calibration-fraction)",
    )
    log: tuple[str, ...] = option((), "loggers besides metrics.jsonl: csv,tensorboard,...")

    def due(self, asked: int) -> int:
        """Return how many of the clients that are asked must give a valid result.

        By default a single client must not stand for all, unless nobody else was asked, or the user
        wants clients to fail.
        """
        if self.min_clients is not None:
            return self.min_clients
        return 0 if self.drop_out or self.corrupt else min(2, asked)


@component
class DataSettings(Component):
    """Settings of the data and its division among clients."""

    kind: ClassVar[str] = "settings"
    name = "data"

    data: str = option(
        "mnist5k", "data set, or your own: a file .csv, .parquet or .npz, or a folder of tables"
    )
    target: str | None = option(None, "column of your table to predict")
    client: str | None = option(None, "column of your table that names the owner of each sample")
    task: str | None = option(
        None,
        "task of your data (none = inferred from the targets or the likelihood)",
        choices=("classification", "regression"),
    )
    drop: tuple[str, ...] = option((), "columns of your table to leave out")
    data_dir: str | None = option(None, "folder of the data set (none = where it is installed)")
    download: bool = option(False, "download the data set if it is absent")
    input_range: str = option(
        "0,1",
        "range of the inputs: `0,1` (as loaded) or `-1,1` (images only)",
        choices=("0,1", "-1,1"),
    )
    partition: str = option(
        "iid",
        "division of the samples among clients: labels:5, ... (for your own data with owners: "
        "natural, unless you choose another)",
    )
    clients: int = option(
        10, "number of clients (for natural: all owners, unless you choose fewer)", at_least=1
    )
    novel_clients: int = option(0, "number of clients held out of training", at_least=0)
    train_per_class: int | None = option(
        None, "training samples per class per client (none = all but the test samples)", at_least=1
    )
    test_per_class: int | None = option(
        None, "test samples per class per client (none = the rest, or --test-fraction)", at_least=1
    )
    test_fraction: float = option(
        0.2,
        "fraction of a client's samples held out for testing, without --test-per-class (0 = none: "
        "nothing is evaluated)",
        at_least=0,
        below=1,
    )
    validation_fraction: float = option(
        0.0,
        "fraction of a client's training samples held out for validation (0 = none)",
        at_least=0,
        below=1,
    )
    calibration_fraction: float = option(
        0.0,
        "fraction of a client's other training samples held out for calibration (0 = none)",
        at_least=0,
        below=1,
    )
    ood: str = option(
        "auto",
        "samples unlike the data that clients should tell from their own: a data set, or an .npz "
        "file with x (auto = Fashion-MNIST for digits and digits for Fashion-MNIST, where "
        "installed; none = off)",
    )
    label_noise: str | None = option(
        None, "noise on the training labels after the split: pair:0.1, ... (none = off)"
    )


SETTINGS: dict[str, type[Component]] = {cls.name: cls for cls in (RunSettings, DataSettings)}
