"""A FedAvg round of the local engine against Flower's simulation, two worker processes each.

Three contestants in turn: the local engine; Flower's own FedAvg strategy with a hand-written
PyTorch client, as its users write it; and the engine ``flower``, that is our client and our
server on Flower's simulation.
"""

from __future__ import annotations

import torch
from flower_client import client_app
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from problems import CLIENTS, alternate, network, problem, report

from bfl_flower.plugin import Flower
from bfl_flower.simulation import simulate_nodes
from bflcore import Average, Equal, Fixed, Map
from bflcore.engines.local import Local
from bflcore.rounds import Recipe, begin, run_round


def main() -> None:
    """Print both ratios."""
    torch.set_num_threads(1)
    work, inference = problem(), Map()
    recipe = Recipe(inference, Average(), Equal(), Fixed())
    start = begin(recipe, work)
    allowed = "<= 0.1"
    with (
        simulate_nodes(client_app(), CLIENTS, 2) as grid,
        Local(workers=2).open(work, inference, 10) as local,
    ):
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        ours, theirs = alternate(
            lambda: run_round(recipe, local, start, work.clients),
            lambda: strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=1),
            repeats=9,
        )
    report("fedavg round, local engine / Flower's FedAvg, simulated", allowed, ours, theirs)
    with (
        Flower(workers=2).open(work, inference, 10) as flower,
        Local(workers=2).open(work, inference, 10) as local,
    ):
        ours, theirs = alternate(
            lambda: run_round(recipe, local, start, work.clients),
            lambda: run_round(recipe, flower, start, work.clients),
            repeats=9,
        )
    report("fedavg round, local engine / engine flower", "none", ours, theirs)


if __name__ == "__main__":
    main()
