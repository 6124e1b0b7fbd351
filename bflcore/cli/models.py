"""``bfl predict`` and ``bfl export``: use what a run learnt, without its data."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bflcore.errors import OptionError, RunError
from bflcore.files import write_text

if TYPE_CHECKING:
    from bflcore.api import ClientModel

__all__ = ["commands"]

RUN = click.argument("run", type=click.Path(path_type=Path))
CLIENT = click.option(
    "--client", "id", metavar="ID", help="owner whose model is used, or: server (for a run)"
)
DEVICE = click.option("--device", default="", help="device [default: that of the run]")


def _out(flag: str, text: str) -> Callable[[Any], Any]:
    return click.option(flag, "out", required=True, type=click.Path(path_type=Path), help=text)


@click.command("predict")
@RUN
@click.argument("samples", metavar="INPUT", type=click.Path(path_type=Path))
@CLIENT
@_out("--out", "file to write (.csv)")
@DEVICE
def predict(run: Path, samples: Path, id: str | None, out: Path, device: str) -> None:
    """Predict the samples in INPUT with a model of RUN, and say how uncertain it is.

    RUN is a run directory, or a file that bfl export wrote. INPUT has the form of the data set: a
    table with the names of its columns, .csv or .parquet; or an .npz file with x, or a .csv file of
    numbers. Encoding and scaling are applied here.
    """
    from bflcore.api.inputs import read_samples

    model = _model(run, id, device)
    described = model.description
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always", UserWarning)
        prediction = model.predict(read_samples(samples, described.shape, described.schema))
    for note in dict.fromkeys(str(one.message) for one in noted):
        click.echo(f"note: {note}", err=True)
    columns = prediction.columns()
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    rows.writerows(zip(*columns.values(), strict=True))
    try:
        write_text(out, text.getvalue())
    except OSError as error:
        raise RunError(
            f"--out: {out} cannot be written ({error.strerror}); choose a writable folder"
        ) from None
    click.echo(f"predictions: {out}")


@click.command("export")
@RUN
@CLIENT
@_out("--to", "file to write (.safetensors)")
@DEVICE
def export(run: Path, id: str | None, out: Path, device: str) -> None:
    """Write a model of RUN to one file, which bfl predict and bflcore.load_model read.

    The file has the model's tensors and how they are used, and no sample.
    """
    click.echo(f"model: {_model(run, id, device).save(out)}")


def _model(path: Path, id: str | None, device: str) -> ClientModel:
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


commands = (predict, export)
