"""How often a fusion rule counts the prior and the data: linear regression, against Bayes' rule.

Four clients of 40, 25, 20 and 15 samples with known noise start from the same prior, and each sends
its exact posterior. README.md shows what comes out; here its figures are computed again.
"""

import re
from pathlib import Path

import pytest
import torch

from bfl_aggregators.plugin import (
    Conflation,
    LinearPool,
    LogLinearPool,
    WeightConsolidation,
    WeightedConflation,
    WeightedSum,
)
from bflcore import Average, Continual, Examples, Fixed, Gaussian, Variational
from bflcore.messages import Broadcast
from bflcore.rounds import Recipe, run_round
from bflcore.testing.problems import Replies, normal, reply

README = Path(__file__).parents[1] / "README.md"
SIZES = (40, 25, 20, 15)
CLIENTS = tuple(range(len(SIZES)))
SHARE = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
HEAVIEST = float(SHARE.max())
EFFECTIVE = float((SHARE / SHARE.max()).sum())  # clients that weighted-conflation counts: 2.5
NOISE = 0.5
PRIOR = Gaussian(normal(3, seed=1), torch.full((3,), 0.5, dtype=torch.float64))
RULES = {
    rule.name: rule()
    for rule in (
        *(WeightConsolidation, Conflation, WeightedConflation, LogLinearPool),
        *(WeightedSum, Average, LinearPool),
    )
}


def inputs(kind):
    """Return inputs ``[N, 3]``: each sees one parameter, or all have a correlation of 0.8."""
    drawn = normal(sum(SIZES), 3, seed=2)
    if kind == "orthogonal":
        return drawn * torch.eye(3, dtype=torch.float64).repeat(34, 1)[: sum(SIZES)]
    covariance = torch.full((3, 3), 0.8, dtype=torch.float64).fill_diagonal_(1.0)
    return drawn @ torch.linalg.cholesky(covariance).T


def shards(kind):
    x = inputs(kind)
    truth = PRIOR.mean + PRIOR.variance.sqrt() * normal(3, seed=3)  # a draw from the prior
    y = x @ truth + NOISE**0.5 * normal(len(x), seed=4)
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


def bayes(prior, shares, form="marginal"):
    """Return the posterior given `shares`: its mean, and marginal or mean-field variances."""
    precision = torch.diag(1 / prior.variance) + sum(x.T @ x for x, _ in shares) / NOISE
    shift = prior.mean / prior.variance + sum(x.T @ y for x, y in shares) / NOISE
    mean = torch.linalg.solve(precision, shift)
    if form == "mean-field":
        return Gaussian(mean, 1 / precision.diag())
    return Gaussian(mean, torch.linalg.inv(precision).diag())


def stacked(posteriors):
    return Gaussian(
        torch.stack([one.mean for one in posteriors]),
        torch.stack([one.variance for one in posteriors]),
    )


def rounds(rule, hyper, kind="orthogonal", cohorts=(CLIENTS,), form="marginal"):
    """Run a round of exact clients for each cohort; return the last fused posterior."""
    recipe = Recipe(Variational(), rule, Examples(), hyper)
    broadcast, data = Broadcast(0, PRIOR, PRIOR), shards(kind)
    for clients in cohorts:
        sent = stacked([bayes(broadcast.prior, [data[client]], form) for client in clients])
        session = Replies(reply(clients, sent, examples=[SIZES[client] for client in clients]))
        broadcast = run_round(recipe, session, broadcast, clients).broadcast
    return broadcast.start


def errors(found, exact):
    """Return the largest error of a mean in standard deviations, and the ratios of variances."""
    error = ((found.mean - exact.mean).abs() / exact.variance.sqrt()).max()
    ratio = found.variance / exact.variance
    return float(error), float(ratio.min()), float(ratio.max())


def assert_counts(found, prior, often):
    """Require N(mean, variance) to be the posterior that counts prior and clients so often."""
    weight = torch.as_tensor(often, dtype=torch.float64).expand(len(SIZES))
    data = shards("orthogonal")
    counted = [(x * w**0.5, y * w**0.5) for (x, y), w in zip(data, weight, strict=True)]
    expected = bayes(Gaussian(PRIOR.mean, PRIOR.variance / prior), counted)
    torch.testing.assert_close(found.variance, expected.variance, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("rule", "prior", "data"),
    [
        ("weight-consolidation", 1, 1),
        ("conflation", len(SIZES), 1),
        ("weighted-conflation", EFFECTIVE, SHARE / HEAVIEST),
        ("log-linear-pool", 1, SHARE),
    ],
)
def test_a_rule_counts_prior_and_data_as_often_as_readme_says(rule, prior, data):
    assert_counts(rounds(RULES[rule], Fixed()), prior, data)


def test_an_average_is_as_uncertain_as_its_clients():
    local = stacked([bayes(PRIOR, [share]) for share in shards("orthogonal")])
    found = rounds(RULES["average"], Fixed())
    torch.testing.assert_close(found.variance, SHARE @ local.variance)
    assert bool((rounds(RULES["linear-pool"], Fixed()).variance > found.variance).all())


def test_correlated_inputs_are_exact_for_no_rule():
    exact = bayes(PRIOR, shards("correlated"))
    for rule in RULES.values():
        for form in ("marginal", "mean-field"):
            found = rounds(rule, Fixed(), "correlated", form=form)
            assert errors(found, exact)[0] > 0.1, (rule.name, form)


def test_mean_field_clients_give_the_precisions_of_the_pooled_posterior():
    found = rounds(RULES["weight-consolidation"], Fixed(), "correlated", form="mean-field")
    pooled = bayes(PRIOR, shards("correlated"), "mean-field")
    torch.testing.assert_close(found.variance, pooled.variance, rtol=1e-10, atol=0)


def test_a_fixed_prior_stays_exact_over_rounds():
    assert_counts(rounds(RULES["weight-consolidation"], Fixed(), cohorts=[CLIENTS] * 3), 1, 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_continual_prior_counts_the_data_once_per_round(count):
    found = rounds(RULES["weight-consolidation"], Continual(), cohorts=[CLIENTS] * count)
    assert_counts(found, 1, count)


def test_conflation_with_a_continual_prior_multiplies_the_prior_by_k_each_round():
    found = rounds(RULES["conflation"], Continual(), cohorts=[CLIENTS] * 2)
    clients = len(SIZES)
    assert_counts(found, clients**2, clients + 1)


def test_with_a_fixed_prior_only_the_clients_of_the_last_round_count():
    found = rounds(RULES["weight-consolidation"], Fixed(), cohorts=[(0, 1), (2, 3)])
    exact = bayes(PRIOR, shards("orthogonal")[2:])
    torch.testing.assert_close(found.variance, exact.variance)
    torch.testing.assert_close(found.mean, exact.mean)


def test_weight_consolidation_subtracts_the_prior_and_not_where_the_round_starts():
    start = Gaussian(PRIOR.mean + 1, PRIOR.variance / 5)
    recipe = Recipe(Variational(), RULES["weight-consolidation"], Examples(), Fixed())
    sent = stacked([bayes(PRIOR, [share]) for share in shards("orthogonal")])
    session = Replies(reply(CLIENTS, sent, examples=SIZES))
    found = run_round(recipe, session, Broadcast(7, start, PRIOR), CLIENTS).broadcast.start
    assert_counts(found, 1, 1)


def test_readme_shows_these_figures():
    printed = {
        name: cells
        for name, *cells in (
            [cell.strip(" `") for cell in line.strip("|").split("|")]
            for line in README.read_text(encoding="utf-8").splitlines()
            if re.match(r"\| `[a-z-]+` \| [\d.]+ \|", line)
        )
    }
    measured = {}
    for name, rule in RULES.items():
        measured[name] = []
        for kind in ("orthogonal", "correlated"):
            error, low, high = errors(rounds(rule, Fixed(), kind), bayes(PRIOR, shards(kind)))
            measured[name] += [f"{error:.2f}", f"{low:.2f} to {high:.2f}"]
    assert printed == measured
