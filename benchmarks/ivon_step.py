"""A client's training step under `ivon` against one under `map` with Adam."""

from __future__ import annotations

import torch
from problems import alternate, problem, report

from bfl_ivon.ivon import Ivon
from bflcore import Broadcast, LocalInference, Map, Problem


def one_round(inference: LocalInference, work: Problem) -> object:
    """Fit one client for ten epochs of five minibatches of 50."""
    start, prior = inference.initial(work), inference.prior(work)
    memory = {name: tensor[None] for name, tensor in inference.initial_memory(work).items()}
    return inference.fit(work, Broadcast(0, start, prior), work.cohort([0], memory, 0))


def main() -> None:
    """Print one ratio with shared noise, the default, and one with new noise in each step."""
    torch.set_num_threads(1)
    work, plain = problem(), Map()
    for windows in (Ivon().noise_windows, 1):
        ours = Ivon(prior_sigma=1.0, noise_windows=windows)
        times = alternate(
            lambda ours=ours: one_round(ours, work), lambda: one_round(plain, work), repeats=41
        )
        report(f"ivon step (noise_windows {windows}) / map step with Adam", "<= 1.2", *times)


if __name__ == "__main__":
    main()
