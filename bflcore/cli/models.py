"""``bfl predict``, ``bfl export``, ``bfl adapt``: use what a run learnt, without its data."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bflcore.errors import OptionError

if TYPE_CHECKING:
    from bflcore.api import ClientModel

__all__ = ["commands"]

STORED = (".safetensors", ".bfl")  # posteriors, for bflcore
PROGRAMS = (".pt2", ".onnx")  # for other runtimes
PIECE = 8 * 2048  # samples predicted between two steps of the bar: whole blocks of a prediction

RUN = click.argument("run", type=click.Path(path_type=Path))
CLIENT = click.option(
    "--client", "id", metavar="ID", help="owner whose model is used, or: server (for a run)"
)
DEVICE = click.option("--device", default="", help="device [default: that of the run]")

LABEL_PRIOR = click.option(
    "--label-prior",
    type=click.Choice(["client", "pooled", "uniform"]),
    help="label frequencies of the samples to predict, for runs with likelihood.label_prior "
    "[default: the run's predict_label_prior]",
)


def _out(flag: str, text: str) -> Callable[[Any], Any]:
    return click.option(flag, "out", required=True, type=click.Path(path_type=Path), help=text)


@click.command("predict")
@RUN
@click.argument("samples", metavar="INPUT", type=click.Path(path_type=Path))
@CLIENT
@_out("--out", "file to write (.csv, .parquet or .npz)")
@click.option(
    "--coverage",
    type=float,
    help="rate at which sets or intervals have the target, for runs with --calibration-fraction "
    "[default: 0.9]",
)
@LABEL_PRIOR
@DEVICE
def predict(
    run: Path,
    samples: Path,
    id: str | None,
    out: Path,
    coverage: float | None,
    label_prior: str | None,
    device: str,
) -> None:
    """Predict the samples in INPUT with a model of RUN, and say how uncertain it is.

    RUN is a run directory, or a file that bfl export or bfl adapt wrote. INPUT has the form of the
    data set: a table with the names of its columns, .csv or .parquet; or an .npz file with x, or a
    .csv or .parquet file of numbers. Encoding and scaling are applied here.
    """
    from bflcore.api.inputs import read_samples
    from bflcore.api.tables import check_table, write_table

    check_table(out)
    model = _model(run, id, device, label_prior)
    x = read_samples(samples, model.description.shape, model.description.schema)
    with _notes():
        columns = _columns(model, x, coverage)
    write_table(out, columns)
    click.echo(f"predictions: {out}")


@click.command("export")
@RUN
@CLIENT
@_out("--to", "file to write (.safetensors or .bfl, .pt2, .onnx)")
@click.option("--draws", type=int, help="draws to average (.pt2, .onnx) [default: the model's]")
@LABEL_PRIOR
@DEVICE
def export(
    run: Path,
    id: str | None,
    out: Path,
    draws: int | None,
    label_prior: str | None,
    device: str,
) -> None:
    """Write a model of RUN to one file.

    A .safetensors or .bfl file has the model's tensors and how they are used: bfl predict and
    bflcore.load_model read it. A .pt2 file (torch.export) or an .onnx file is a program that needs
    no bflcore: it takes raw samples, averages draws of the network's parameters, and returns
    probabilities, or means and variances. No file contains samples.
    """
    if out.suffix not in {*STORED, *PROGRAMS}:
        raise OptionError(
            f"--to: {out} has an unknown format; allowed: a name that ends in "
            f"{', '.join((*STORED, *PROGRAMS))}"
        )
    if out.suffix in PROGRAMS:
        said = _model(run, id, device or "cpu", label_prior).export(out, draws)
        click.echo(f"program: {out}\n{said}")
        return
    if draws is not None:
        raise OptionError(
            f"--draws: {out} holds the posterior, not draws; leave it out, or write a "
            f"{' or '.join(PROGRAMS)} file"
        )
    click.echo(f"model: {_model(run, id, device, label_prior).save(out)}")


@click.command("adapt")
@RUN
@click.argument("samples", metavar="SAMPLES", type=click.Path(path_type=Path))
@_out("--out", "file to write (.bfl or .safetensors)")
@DEVICE
def adapt(run: Path, samples: Path, out: Path, device: str) -> None:
    """Make a model for a client that RUN never saw, from its SAMPLES.

    SAMPLES is an .npz file with x and y, in the form of the data set, or a table with the columns
    and the target of the one that RUN was trained on. The method adapts as it does
    for clients held out of training (--novel-clients); bfl predict reads the file.
    """
    from bflcore.api import load
    from bflcore.api.tables import read_examples

    if out.suffix not in STORED:
        raise OptionError(
            f"--out: {out} has an unknown format; allowed: a name that ends in {', '.join(STORED)}"
        )
    found = load(run, device)
    with _notes():
        model = found.adapt(*read_examples(samples, found.schema))
    click.echo(f"model: {model.save(out)} (adapted to {model.size} samples)")


@contextmanager
def _notes() -> Iterator[None]:
    """Print each warning of the block once, in one line."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always", UserWarning)
        yield
    for said in dict.fromkeys(str(note.message) for note in noted):
        click.echo(f"note: {said}", err=True)


def _columns(model: ClientModel, x: Any, coverage: float | None) -> dict[str, list[object]]:
    """Predict in pieces, with a bar on a terminal where there are many; return the table."""
    found: dict[str, list[object]] = {}
    starts = range(0, len(x), PIECE) if len(x) else [0]
    with click.progressbar(starts, file=sys.stderr, hidden=len(x) <= PIECE) as pieces:
        for start in pieces:
            prediction = model.predict(x[start : start + PIECE])
            for name, column in prediction.columns(coverage).items():
                found.setdefault(name, []).extend(column)
    return found


def _model(path: Path, id: str | None, device: str, label_prior: str | None) -> ClientModel:
    """Return the model of a client of a run, or the one in a file; `label_prior` None: its own."""
    model = _found(path, id, device)
    return model if label_prior is None else model.assuming(label_prior)


def _found(path: Path, id: str | None, device: str) -> ClientModel:
    """Return the model of a client of a run, or the one in a file."""
    from bflcore.api import load, load_model

    if path.is_file():
        model = load_model(path, device)
        if id not in {None, str(model.id)}:
            raise OptionError(f"--client: {path} is the model of {model.id}; leave --client out")
        return model
    run = load(path, device)
    if id is None:
        ids = ", ".join(map(str, run.clients[:10]))
        more = ", ..." if len(run.clients) > 10 else ""
        raise OptionError(f"--client is missing; allowed: {ids}{more}, or server")
    return run.server if id == "server" else run.client(id)


commands = (predict, export, adapt)
