"""Whole runs: what the checkpoint holds is the prior times the clients' sites."""

from __future__ import annotations

import pytest
import torch

import bflcore
from bflcore import Gaussian
from bflcore.experiments.directory import RunDirectory
from bflcore.inference.sites import SiteMemory, exact_natural

OPTIONS = {
    "dataset.owners": 4,
    "dataset.samples": 20,
    "dataset.features": 6,
    "dataset.classes": 3,
    "model.hidden": (5,),
    "inference.local_epochs": 2,
}


class KilledError(Exception):
    """The process dies."""


def stop(number, loss, record):
    if number == 5:
        raise KilledError


def product_error(folder, prior_variance):
    """Return how far the checkpoint's posterior is from p0 prod t_k, relative to the posterior."""
    saved = RunDirectory.open(folder).checkpoints.read(Gaussian)
    found = exact_natural(saved.broadcast.start)
    precision = torch.full_like(found["precision"], 1 / prior_variance)
    shift = torch.zeros_like(precision)
    assert saved.memories
    for memory in saved.memories.values():
        site = SiteMemory.unpack(memory, Gaussian).site
        precision, shift = precision + site["precision"], shift + site["shift"]
    apart = (found["shift"] - shift).abs() / (shift.abs() + precision.sqrt())
    return float(torch.maximum((found["precision"] / precision - 1).abs(), apart).max())


@pytest.mark.parametrize(("workers", "share"), [(1, "all"), (2, "body")])
def test_the_books_balance_after_drop_outs_garbage_partial_rounds_and_a_kill(
    tmp_path, workers, share
):
    out, told = tmp_path / "run", {"data": "synthetic", "partition": "natural", "clients": 4}
    with pytest.raises(KilledError):
        bflcore.run(
            "pvi-damped",
            out=out,
            progress=stop,
            options=OPTIONS | {"inference.damping": 0.5},
            **told,
            rounds=9,
            cohort=3,
            drop_out=0.3,
            corrupt=0.2,
            min_clients=0,
            workers=workers,
            share=share,
            checkpoint_every=2,
            ood="none",
        )
    bflcore.resume(out)
    assert product_error(out, 1.0) < 1e-5
    line = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    assert '"inference.corrected"' in line or '"train.loss": NaN' in line
