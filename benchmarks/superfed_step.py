"""A client's training step under `superfed-mm` and `-lm` against one of `fedavg`, same SGD."""

from __future__ import annotations

import attrs
import torch
from problems import alternate, problem, report

from bfl_superfed.superfed import LowLossSubspace
from bflcore import Broadcast, Layout, LocalInference, Map, Problem
from bflcore.models import TwoNN
from bflcore.randomness import seeded_globally

SGD = {"optimiser": "sgd", "momentum": 0.9, "weight_decay": 1e-4, "lr": 0.01}


def two_nn() -> Problem:
    """Return ten clients with the paper's perceptron (784-200-200-10)."""
    work = problem()
    with seeded_globally(0, "benchmark"):
        network = TwoNN().network((1, 28, 28), 10)
    layout = Layout.of(network, TwoNN().head(network))
    initial = layout.flatten(dict(network.named_parameters()))
    return attrs.evolve(work, network=network, layout=layout, initial=initial)


def one_round(inference: LocalInference, work: Problem) -> object:
    """Fit one client for one epoch of 25 minibatches of ten."""
    start = inference.initial(work)
    memory = {name: tensor[None] for name, tensor in inference.initial_memory(work).items()}
    return inference.fit(work, Broadcast(0, start, start), work.cohort([0], memory, 0))


def main() -> None:
    """Print one ratio a mixing."""
    torch.set_num_threads(1)
    work = two_nn()
    schedule = {"local_epochs": 10, "batch_size": 10}
    plain = Map(**SGD, **schedule)
    for mixing, nu in (("model", 1.0), ("layer", 2.0)):
        ours = LowLossSubspace(
            **SGD, **schedule, mixing=mixing, nu=nu, start=0.0, lambda_selection="fixed"
        )
        times = alternate(
            lambda ours=ours: one_round(ours, work), lambda: one_round(plain, work), repeats=15
        )
        report(f"superfed step ({mixing}) / fedavg step, two-nn, batches of 10", "<= 1.4", *times)


if __name__ == "__main__":
    main()
