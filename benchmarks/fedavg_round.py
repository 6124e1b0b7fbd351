"""A `fedavg` round against a hand-written PyTorch loop that takes the same steps."""

from __future__ import annotations

import copy

import torch
from problems import BATCH, CLIENTS, EPOCHS, alternate, problem, report
from torch import nn

from bflcore import Average, Examples, Fixed, Map
from bflcore.engines.local import Local
from bflcore.rounds import Recipe, begin, run_round


def main() -> None:
    """Print the ratio."""
    torch.set_num_threads(1)
    work = problem()
    recipe = Recipe(Map(), Average(), Examples(), Fixed())
    start = begin(recipe, work)

    def by_hand() -> dict[str, torch.Tensor]:
        states = []
        for client in range(CLIENTS):
            model = copy.deepcopy(work.network)
            optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
            x, y = work.train.of(client)
            for _ in range(EPOCHS):
                for index in torch.randperm(len(x)).split(BATCH):
                    optimiser.zero_grad()
                    loss = nn.functional.cross_entropy(model(x[index]), y[index])
                    loss.backward()
                    optimiser.step()
            states.append(model.state_dict())
        return {name: sum(state[name] for state in states) / CLIENTS for name in states[0]}

    with Local(workers=1).open(work, recipe.inference, 10) as session:
        ours, theirs = alternate(
            lambda: run_round(recipe, session, start, work.clients), by_hand, repeats=9
        )
    report("fedavg round / hand-written loop, one thread", "<= 1.10", ours, theirs)


if __name__ == "__main__":
    main()
