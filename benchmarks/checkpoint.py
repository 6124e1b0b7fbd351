"""A round with its checkpoint against the round alone: ten clients, 80,000 parameters.

Every client's memory changes in every round, which is the most there can be to write.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import attrs
import torch
from problems import alternate, network, problem, report

from bflcore import Average, Equal, Fixed, Layout, Map, Variational
from bflcore.engines.local import Local
from bflcore.experiments.checkpoint import Checkpoints
from bflcore.inference.base import LocalInference
from bflcore.rounds import Recipe, begin, run_round


def main() -> None:
    """Print the ratio where nothing, and where almost everything, is a client's own."""
    torch.set_num_threads(1)
    for inference, sharing in ((Map(), "all"), (Variational(), "body"), (Variational(), "head")):
        measure(inference, sharing)


def measure(inference: LocalInference, sharing: str) -> None:
    """Print the ratio for one way to share."""
    work = attrs.evolve(problem(), layout=Layout.of(network(), "3", sharing))
    recipe = Recipe(inference, Average(), Equal(), Fixed())
    start = begin(recipe, work)
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(Path(folder) / "checkpoint") as checkpoints,
        Local(workers=1).open(work, inference, 10) as session,
    ):

        def kept() -> None:
            done = run_round(recipe, session, start, work.clients)
            checkpoints.write(done.broadcast, session.memories, {})

        ours, theirs = alternate(
            kept, lambda: run_round(recipe, session, start, work.clients), repeats=9
        )
    name = f"{inference.name} round, {sharing} shared, with / without a checkpoint"
    report(name, "<= 1.05", ours, theirs)


if __name__ == "__main__":
    main()
