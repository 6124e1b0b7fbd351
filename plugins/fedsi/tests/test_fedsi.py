"""A client's round, personalisation and predictions of FedSI, and what it refuses."""

import math

import attrs
import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import nn

from bfl_fedsi import fedsi, laplace
from bfl_fedsi.fedsi import SubnetworkLaplace
from bflcore import Average, Broadcast, Continual, Equal, Gaussian, GaussianNoise, OptionError
from bflcore.engines.local import Local
from bflcore.experiments.resolve import resolve
from bflcore.problem import metrics
from bflcore.problem.likelihoods import Likelihood
from bflcore.registry.loading import load_registry
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.problems import cohort, convolutional, dense, first_broadcast, normal, problem

DOUBLE = torch.float64
STEP = {"local_epochs": 1, "batch_size": 100, "optimiser": "sgd", "lr": 0.1}


def sent(of, inference, seed=3):
    """A broadcast whose prior is not the start."""
    start = first_broadcast(inference, of).start
    prior = Gaussian(
        start.mean + 0.1 * normal(len(start.mean), seed=seed),
        normal(len(start.mean), seed=seed + 1).exp(),
    )
    return Broadcast(0, start, prior)


def predicted(inference, of, memory, broadcast, x=None):
    """What clients with these memories predict; by default on the first client's samples."""
    members = attrs.evolve(cohort(of, inference), memory=memory)
    x = of.train.of(0)[0].expand(len(members.clients), -1, -1) if x is None else x
    return inference.predict(of, broadcast, members, x)


def test_the_recipes_are_the_papers():
    ours, factorised = (resolve(load_registry(), name, {}, {}) for name in ("fedsi", "fedsi-fac"))
    for method in (ours, factorised):
        assert (method.run.share, method.run.rounds) == ("body", 60)
        assert (method.hyper, method.weighting) == (Continual(zero_variance=0), Equal())
        assert method.inference.predict_select == "informative"
    assert (ours.inference.covariance, ours.inference.fraction) == ("auto", 0.05)
    assert (factorised.inference.covariance, factorised.inference.fraction) == ("diagonal", 1)
    assert SubnetworkLaplace().prior_variance == 1e-4
    assert SubnetworkLaplace().fraction == 0.05
    assert SubnetworkLaplace().select == "variance"


def test_a_step_of_the_map_descends_the_gradient_of_eq_10():
    of = problem(sizes=(9,), sharing="body")
    inference = SubnetworkLaplace(**STEP)
    broadcast = sent(of, inference)
    fitted = inference.fit(of, broadcast, cohort(of, inference))
    body, head = of.layout.split(of.initial)
    theta = body.clone().requires_grad_()
    x, y = of.train.of(0)
    outputs = of.forward(of.layout.join(theta, head)[None], x[None])[0]
    prior = broadcast.prior
    penalty = ((theta - prior.mean).square() / (2 * prior.variance)).sum()
    ((of.likelihood.nll(outputs, y).sum() + penalty) / len(x)).backward()
    torch.testing.assert_close(fitted.posterior.mean[0], body - 0.1 * theta.grad)


def test_what_travels_is_the_map_and_the_subnetworks_variances():
    of = problem(sizes=(9,), sharing="body")
    inference = SubnetworkLaplace(fraction=0.25, **STEP)
    broadcast = sent(of, inference)
    fitted = inference.fit(of, broadcast, cohort(of, inference))
    head = of.layout.split(of.initial)[1]
    whole = of.layout.join(fitted.posterior.mean[0], head)
    x = of.train.of(0)[0]
    one, g = torch.ones((), dtype=DOUBLE), broadcast.prior.variance
    index = laplace.select("variance", laplace.diagonal(of, whole, x, one), g, 4, torch.Generator())
    found = laplace.infer(of, whole, x, one, g, index, "auto")
    torch.testing.assert_close(fitted.posterior.variance[0], found.variance)
    assert int((fitted.posterior.variance > 0).sum()) == 4  # a quarter of 16


def test_heads_stay_at_their_common_initialisation_while_clients_train():
    of = problem(sharing="body")
    inference = SubnetworkLaplace(local_epochs=2)
    recipe = Recipe(inference, Average(), Equal(), Continual(zero_variance=0.0))
    with Local(workers=1).open(of, inference, 10) as session:
        broadcast = run_round(recipe, session, begin(recipe, of), of.clients).broadcast
        memories = session.memories
    head = of.layout.split(of.initial)[1]
    assert all(torch.equal(memory["personal.mean"], head) for memory in memories.values())
    assert not torch.equal(broadcast.start.mean, begin(recipe, of).start.mean)


def test_a_prior_variance_of_zero_becomes_alpha():
    of = problem(sharing="body")
    inference = SubnetworkLaplace(prior_variance=0.3)
    broadcast = sent(of, inference)
    zeros = Gaussian(
        broadcast.prior.mean, broadcast.prior.variance.index_fill(0, torch.tensor([2]), 0)
    )
    g = fedsi.substitute_alpha(zeros, inference.prior_variance)
    expected = broadcast.prior.variance.clone()
    expected[2] = 0.3
    torch.testing.assert_close(g, expected)
    first = begin(Recipe(inference, Average(), Equal(), Continual()), of).prior.variance
    assert torch.equal(first, torch.full_like(first, 0.3))


CASES = {
    "probit": {},
    "mc": {"predictive": "mc", "predict_draws": 5},
    "mean": {"predictive": "mean"},
    "primal": {"covariance": "primal"},
    "dual": {"covariance": "dual"},
    "diagonal": {"covariance": "diagonal", "fraction": 1.0},
    "random": {"select": "random", "predict_select": "random"},
    "informative": {"select": "informative", "predict_select": "informative"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("network", ["dense", "convolutional"])
def test_a_cohort_is_its_clients_one_by_one(case, network):
    sizes = (7, 5, 2)
    if network == "dense":
        of = problem(dense(), sizes, sharing="body")
    else:
        of = problem(convolutional(), sizes, (2, 4, 4), head="4", sharing="body")
    inference = SubnetworkLaplace(**{"fraction": 0.3, "batch_size": 3, **CASES[case]})
    broadcast = sent(of, inference)
    members = cohort(of, inference)
    together = inference.fit(of, broadcast, members)
    tuned = inference.personalise(of, broadcast, members)
    x = of.train.x[:3]
    together_predicted = predicted(inference, of, tuned, broadcast, x.expand(3, *x.shape))
    for row, client in enumerate(members.clients):
        alone = cohort(of, inference, [client])
        fitted = inference.fit(of, broadcast, alone)
        for name, tensor in fitted.posterior.pack().items():
            torch.testing.assert_close(together.posterior.pack()[name][row], tensor[0])
        own = inference.personalise(of, broadcast, alone)
        single = inference.predict(of, broadcast, attrs.evolve(alone, memory=own), x[None])
        torch.testing.assert_close(together_predicted.draws[row], single.draws[0])
        torch.testing.assert_close(together_predicted.mean[row], single.mean[0])


def test_personalisation_fits_the_head_alone_and_the_same_way_for_novel_clients():
    of = problem(sizes=(9, 9), sharing="body", novel=(1,))
    inference = SubnetworkLaplace(head_epochs=30, head_lr=0.05)
    broadcast = sent(of, inference)
    members = cohort(of, inference, [1])
    assert members.novel
    tuned = inference.personalise(of, broadcast, members)
    x, y = of.train.of(1)

    def loss(memory):
        whole = of.layout.join(broadcast.start.mean, memory["personal.mean"][0])
        return float(of.likelihood.nll(of.forward(whole[None], x[None])[0], y).mean())

    assert loss(tuned) < 0.8 * loss(members.memory)
    trained = inference.personalise(of, broadcast, attrs.evolve(members, novel=False))
    assert torch.equal(tuned["personal.mean"], trained["personal.mean"])


def test_fine_tuning_moves_the_head_under_a_fixed_body():
    of = problem(sizes=(9,), sharing="body")
    inference = SubnetworkLaplace(head_epochs=6, head_lr=0.1, batch_size=100)
    broadcast = sent(of, inference)
    tuned = inference.personalise(of, broadcast, cohort(of, inference))
    x, y = of.train.of(0)
    head = of.layout.split(of.initial)[1].clone().requires_grad_()
    adam = torch.optim.Adam([head], lr=0.1)
    for _ in range(6):
        adam.zero_grad()
        outputs = of.forward(of.layout.join(broadcast.start.mean, head)[None], x[None])[0]
        of.likelihood.nll(outputs, y).mean().backward()
        adam.step()
    torch.testing.assert_close(tuned["personal.mean"][0], head.detach())


def test_the_pull_of_fine_tuning_shortens_the_head():
    of = problem(sizes=(9,), sharing="body")
    long, short = (
        inference.personalise(of, sent(of, inference), cohort(of, inference))
        for inference in (
            SubnetworkLaplace(head_epochs=50),
            SubnetworkLaplace(head_epochs=50, head_weight_decay=1.0),
        )
    )
    assert short["personal.mean"].norm() < 0.7 * long["personal.mean"].norm()


def test_probit_is_nearer_to_many_draws_than_the_mean_is_and_less_sure():
    of = problem(sizes=(9,), sharing="body")
    options = {"fraction": 1.0, "prior_variance": 0.3, "predict_draws": 20_000}
    draws = {}
    for predictive in ("probit", "mc", "mean"):
        inference = SubnetworkLaplace(predictive=predictive, **options)
        broadcast = first_broadcast(inference, of)
        tuned = inference.personalise(of, broadcast, cohort(of, inference))
        draws[predictive] = predicted(inference, of, tuned, broadcast).mean
    sure = {name: float(p.max(-1).values.mean()) for name, p in draws.items()}
    assert sure["probit"] < sure["mean"]
    off = {name: float((draws[name] - draws["mc"]).abs().mean()) for name in ("probit", "mean")}
    assert off["probit"] < min(0.02, off["mean"])


def uncertainties(predictive):
    """The metrics of the first client's predictions per sample; the labels are arbitrary."""
    closed = predictive.closed_form
    sums = metrics.classification_sums(
        predictive.draws[0],
        torch.zeros(predictive.draws.shape[2], dtype=torch.int64),
        closed_form=None if closed is None else closed[0],
    )
    return metrics.metrics_of(sums)


def linearised(inference, of, broadcast, tuned, x):
    """The first client's linearised logits: f ``[B, O]`` and their covariance ``[B, O, O]``."""
    weights = of.layout.join(broadcast.start.mean, tuned["personal.mean"][0])
    memory = fedsi.SubnetworkMemory.unpack(tuned, Gaussian)
    return laplace.linearise(of, weights, memory.subnetwork(0), x)


def test_probit_reports_the_uncertainty_of_the_linearised_logits_by_monte_carlo():
    of = problem(sizes=(9,), sharing="body")
    inference = SubnetworkLaplace(fraction=1.0, prior_variance=0.3, predict_draws=20_000)
    broadcast = first_broadcast(inference, of)
    tuned = inference.personalise(of, broadcast, cohort(of, inference))
    x = of.train.of(0)[0]
    found = uncertainties(predicted(inference, of, tuned, broadcast))
    f, covariance = (t.numpy() for t in linearised(inference, of, broadcast, tuned, x))
    rng = np.random.default_rng(0)
    logits = np.stack(
        [
            rng.multivariate_normal(mean, spread, 20_000, method="eigh")
            for mean, spread in zip(f, covariance, strict=True)
        ]
    )
    p = special.softmax(logits, axis=-1)  # [B, S, O]
    epistemic = p.var(1).sum(1).mean()
    aleatoric = (p * (1 - p)).mean(1).sum(1).mean()
    information = stats.entropy(p.mean(1), axis=1) - stats.entropy(p, axis=2).mean(1)
    assert epistemic > 0.01
    assert found["epistemic"] == pytest.approx(epistemic, rel=0.05)
    assert found["aleatoric"] == pytest.approx(aleatoric, rel=0.05)
    assert found["mutual_information"] == pytest.approx(information.mean(), rel=0.05)


def test_under_probit_the_draws_do_not_change_the_prediction():
    of = problem(sizes=(9,), sharing="body")
    inference = SubnetworkLaplace(fraction=1.0, prior_variance=0.3, predict_draws=3)
    broadcast = first_broadcast(inference, of)
    tuned = inference.personalise(of, broadcast, cohort(of, inference))
    x = of.train.of(0)[0]
    f, covariance = linearised(inference, of, broadcast, tuned, x)
    spread = covariance.diagonal(dim1=1, dim2=2)
    expected = (f / (1 + math.pi / 8 * spread).sqrt()).softmax(1)
    found = predicted(inference, of, tuned, broadcast)
    torch.testing.assert_close(found.mean[0], expected)
    alone = metrics.metrics_of(metrics.classification_sums(expected[None], of.train.of(0)[1]))
    ours = metrics.metrics_of(
        metrics.classification_sums(
            found.draws[0], of.train.of(0)[1], closed_form=found.closed_form[0]
        )
    )
    for name in ("accuracy", "nll", "brier", "ece", "entropy"):
        assert ours[name] == pytest.approx(alone[name])


def test_without_covariance_nothing_is_epistemic_and_probit_is_the_mean():
    of = problem(sizes=(9,), sharing="body")
    inference = SubnetworkLaplace(fraction=1.0)
    broadcast = first_broadcast(inference, of)
    certain = Gaussian(broadcast.start.mean, torch.zeros_like(broadcast.start.variance))
    members = cohort(of, inference)  # without a subnetwork: the server's variances
    x = of.train.of(0)[0]
    found = inference.predict(of, attrs.evolve(broadcast, start=certain), members, x[None])
    expected = of.forward(of.initial[None], x[None])[0].softmax(1)
    torch.testing.assert_close(found.mean[0], expected)
    assert uncertainties(found)["epistemic"] == pytest.approx(0, abs=1e-12)
    assert uncertainties(found)["mutual_information"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("predictive", ["probit", "mc"])
def test_draws_do_not_depend_on_how_the_samples_are_divided(predictive):
    of = problem(sizes=(9,), sharing="body")
    inference = SubnetworkLaplace(predictive=predictive, prior_variance=0.3, predict_draws=4)
    broadcast = first_broadcast(inference, of)
    tuned = inference.personalise(of, broadcast, cohort(of, inference))
    x = of.train.of(0)[0][None]
    whole = predicted(inference, of, tuned, broadcast, x).draws
    parts = [
        predicted(inference, of, tuned, broadcast, x[:, a:b]).draws for a, b in ((0, 4), (4, 9))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=2), whole)


def test_draws_have_the_moments_they_are_drawn_from():
    root = normal(1, 1, 3, 3, seed=4)
    mean, covariance = normal(1, 1, 3, seed=5), root @ root.mT
    drawn = laplace.sample_outputs(mean, covariance, 50_000, [torch.Generator().manual_seed(0)])[
        0, :, 0
    ]
    torch.testing.assert_close(drawn.mean(0), mean[0, 0], atol=0.05, rtol=0)
    torch.testing.assert_close(drawn.T.cov(), covariance[0, 0], atol=0.1, rtol=0.03)


def regression():
    return problem(sizes=(9, 4), sharing="body", likelihood=GaussianNoise(noise_variance=0.3))


@pytest.mark.parametrize("noise", ["learned", "likelihood"])
def test_a_regression_predicts_the_moments_of_the_linearised_network(noise):
    of = regression()
    inference = SubnetworkLaplace(fraction=1.0, prior_variance=0.5, noise=noise)
    broadcast = first_broadcast(inference, of)
    tuned = inference.personalise(of, broadcast, cohort(of, inference))
    x, y = of.train.of(1)
    found = predicted(inference, of, tuned, broadcast, x.expand(2, -1, -1))
    weights = of.layout.join(broadcast.start.mean, tuned["personal.mean"][1])
    f = of.forward(weights[None], x[None])[0]
    expected = float((f - y).square().mean()) if noise == "learned" else 0.3
    assert float(found.noise[1]) == pytest.approx(expected)
    torch.testing.assert_close(found.draws[1].mean(0), f)
    g = broadcast.prior.variance
    own = laplace.infer(of, weights, x, found.noise[1, 0, 0], g, torch.arange(len(g)), "auto")
    _, covariance = laplace.linearise(of, weights, own, x)
    spread = found.draws[1].var(0, correction=0)
    torch.testing.assert_close(spread, covariance.diagonal(dim1=1, dim2=2))


def test_the_servers_model_predicts_with_the_variances_that_travelled():
    of = problem(sizes=(9,), sharing="all")
    inference = SubnetworkLaplace(prior_variance=0.5)
    members = attrs.evolve(cohort(of, inference), memory={})
    found = inference.predict(of, first_broadcast(inference, of), members, of.train.x[None])
    everything = torch.arange(of.layout.total)
    block = next(laplace.blocks(of, of.initial, of.train.x, 1))
    spread = block.columns(everything).square().sum(2) * 0.5
    expected = (block.outputs / (1 + math.pi / 8 * spread).sqrt()).softmax(1)
    torch.testing.assert_close(found.mean[0], expected)


class Unknown(Likelihood):
    name = "unknown"
    task = "classification"
    nll = predictive = None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0.0}, "fraction: 0.0 .* above 0 and at most 1"),
        ({"fraction": 1.5}, "fraction"),
        ({"prior_variance": 0.0}, "prior_variance: 0.0 .* above 0"),
        ({"prior_variance": -1.0}, "prior_variance"),
        ({"select": "best"}, "variance | curvature-aware"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        SubnetworkLaplace(**options)


def test_a_network_that_is_all_head_is_refused():
    of = problem(nn.Sequential(nn.Linear(3, 2)), head="0", sharing="body")
    with pytest.raises(OptionError, match="--share: .* nothing to infer; allowed: share all"):
        SubnetworkLaplace().check(of)


def test_a_likelihood_of_unknown_curvature_is_refused():
    with pytest.raises(OptionError, match="unknown .* allowed: categorical, gaussian"):
        SubnetworkLaplace().check(attrs.evolve(problem(), likelihood=Unknown()))


def test_a_subnetwork_beyond_memory_is_refused_with_its_size(monkeypatch):
    of = problem(sizes=(9,))
    monkeypatch.setattr(fedsi, "available_memory", lambda device: 4000)
    full = SubnetworkLaplace(fraction=1.0, covariance="primal")  # 4 * 26^2 doubles
    assert full.bytes_needed(of) == 4 * 26**2 * 8
    with pytest.raises(OptionError, match="26 parameters .* GiB .* lower inference.fraction"):
        full.check(of)
    attrs.evolve(full, fraction=0.1).check(of)
    attrs.evolve(full, covariance="diagonal").check(of)


def test_this_machine_has_memory():
    assert fedsi.available_memory(torch.device("cpu")) > 2**28


QUICK = (
    "--data", "synthetic", "--partition", "natural", "--clients", "4", "--rounds", "2",
    "--eval-every", "1", "--local-epochs", "1", "--workers", "1", "-o", "dataset.owners=4",
    "-o", "dataset.samples=30", "--quiet",
)  # fmt: skip


OTHER_PARTS = {  # flags -> whether the run is warned of
    (): False,
    ("--aggregator", "linear-pool"): False,
    ("--aggregator", "log-linear-pool"): True,
    ("--aggregator", "conflation"): True,
    ("--aggregator", "conflation", "-o", "inference.fraction=1"): False,
    ("--hyper", "empirical-bayes"): False,
    ("--share", "all"): False,
    ("--novel-clients", "1"): False,
    ("-o", "inference.predictive=mc"): False,
}


@pytest.mark.parametrize(("flags", "warned"), OTHER_PARTS.items(), ids=str)
def test_a_run_mixes_with_other_parts(bfl, tmp_path, flags, warned):
    if "--aggregator" in flags:
        pytest.importorskip("bfl_aggregators")
    status, _, err = bfl("run", "fedsi", *QUICK, *flags, "--out", "run")
    assert status == 0, err
    assert err.startswith("warning: inference subnetwork-laplace sends variance 0") == warned
    assert len(err.splitlines()) == warned
    assert '"dropped": []' in (tmp_path / "run" / "summary.json").read_text()


def test_the_factorised_method_runs(bfl):
    assert bfl("run", "fedsi-fac", *QUICK)[0] == 0


@pytest.mark.parametrize(
    "flags",
    [("-o", "inference.fraction=0"), ("-o", "inference.prior_variance=0"), ("--share", "none")],
    ids=" ".join,
)
def test_a_mistake_is_one_line_and_nothing_is_written(bfl, tmp_path, flags):
    status, _, err = bfl("run", "fedsi", *QUICK, *flags, "--out", "run")
    assert status == 2
    assert len(err.strip().splitlines()) == 1
    assert "allowed:" in err
    assert not (tmp_path / "run").exists()
