"""A variational round against bayesian-torch's layers in a plain loop on the same work."""

from __future__ import annotations

import warnings

import torch
from problems import BATCH, CLIENTS, EPOCHS, SAMPLES, alternate, problem, report
from torch import nn

from bflcore import Average, Broadcast, Examples, Fixed, Variational
from bflcore.engines.local import Local
from bflcore.rounds import Recipe, begin, run_round

ESTIMATORS = {
    "reparameterisation": "Reparameterization",
    "local-reparameterisation": "Reparameterization",
    "flipout": "Flipout",
}


def main() -> None:
    """Print one ratio per estimator; bayesian-torch has no local reparameterisation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss
    torch.set_num_threads(1)
    work = problem()
    prior = {
        "prior_mu": 0.0,
        "prior_sigma": 1.0,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": -3.0,
        "moped_enable": False,
    }
    for estimator, theirs_kind in ESTIMATORS.items():
        inference = Variational(estimator=estimator, prior_sigma=1.0)
        recipe = Recipe(inference, Average(), Examples(), Fixed())
        start: Broadcast = begin(recipe, work)

        def plain_loop(kind: str = theirs_kind) -> None:
            for client in range(CLIENTS):
                model = nn.Sequential(
                    nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)
                )
                dnn_to_bnn(model, {**prior, "type": kind})
                optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
                x, y = work.train.of(client)
                for _ in range(EPOCHS):
                    for index in torch.randperm(len(x)).split(BATCH):
                        optimiser.zero_grad()
                        nll = nn.functional.cross_entropy(model(x[index]), y[index])
                        (nll + get_kl_loss(model) / SAMPLES).backward()
                        optimiser.step()

        with Local(workers=1).open(work, inference, 10) as session:
            ours, theirs = alternate(
                lambda r=recipe, s=start, w=session: run_round(r, w, s, work.clients),
                plain_loop,
                repeats=5,
            )
        name = f"variational round, {estimator} / bayesian-torch {theirs_kind}, one thread"
        report(name, "<= 0.333", ours, theirs)


if __name__ == "__main__":
    main()
