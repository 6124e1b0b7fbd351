"""Label priors, against counts and densities that are computed here by hand."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from scipy import special

import bflcore
from bflcore import Average, Equal, Fixed, Map, OptionError, Variational
from bflcore.engines.local import Local
from bflcore.experiments.surveys import survey
from bflcore.problem.label_prior import LABEL_COUNTS, label_counts, log_label_prior
from bflcore.problem.likelihoods import Categorical, GaussianNoise
from bflcore.rounds import Recipe, begin
from bflcore.testing.problems import difference, problem, separable

STRENGTH = 3.0


def prior_by_hand(counts, pooled, strength):
    base = (np.asarray(pooled) + 1 / len(pooled)) / (sum(pooled) + 1)
    found = np.asarray(counts) + strength * base
    return found / found.sum()


def surveyed(of, inference=None):
    inference = inference or Map(local_epochs=1)
    with Local(workers=1).open(of, inference, 1) as session:
        return of.surveyed(survey(inference, of, session).sums)


def counts_of(of):
    return [np.bincount(of.train.of(k)[1], minlength=3) for k in range(len(of.train.start))]


def priors_of(of, strength=STRENGTH):
    counts = counts_of(of)
    pooled = sum(counts[k] for k in of.clients)
    return [prior_by_hand(each, pooled, strength) for each in counts]


@pytest.mark.parametrize("strength", [1e-6, 0.5, 40.0])
def test_the_prior_is_the_mean_of_a_dirichlet_posterior(strength):
    counts, pooled = torch.tensor([8, 0, 2]), torch.tensor([30, 10, 0])
    found = log_label_prior(counts, pooled, strength)
    np.testing.assert_allclose(
        found, np.log(prior_by_hand([8, 0, 2], [30, 10, 0], strength)), rtol=1e-12
    )


def test_a_label_that_nobody_has_is_improbable_and_not_impossible():
    nobody = torch.zeros(4, dtype=torch.int64)
    assert torch.allclose(
        log_label_prior(nobody, nobody, 1.0).exp(), torch.full((4,), 0.25).double()
    )
    found = log_label_prior(torch.tensor([500, 0, 0]), torch.tensor([500, 500, 0]), 1e-3).exp()
    assert 0 < found[2] < found[1] < 1e-5
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)


def test_a_strong_prior_is_everybodys_and_a_weak_one_the_clients():
    counts, pooled = torch.tensor([9, 1]), torch.tensor([50, 150])
    assert torch.allclose(
        log_label_prior(counts, pooled, 1e9).exp(),
        torch.tensor([50.5, 150.5], dtype=torch.float64) / 201,
    )
    assert torch.allclose(
        log_label_prior(counts, pooled, 1e-9).exp(), torch.tensor([0.9, 0.1]).double()
    )


def test_counts_do_not_read_padding():
    of = separable()
    cohort = of.cohort(sorted(range(3), key=lambda k: -of.train.size(k)), {}, 0)
    loud = attrs.evolve(cohort, y=cohort.y.clone())
    for row, size in enumerate(cohort.sizes):
        loud.y[row, size:] = 2
    found = label_counts(loud, 3).tolist()
    assert found == [counts_of(of)[client].tolist() for client in cohort.clients]


def test_the_survey_pools_the_labels_of_those_that_train_and_of_nobody_else():
    of = problem(sizes=(7, 5, 2), novel=(2,), likelihood=Categorical(label_prior=1.0))
    found = surveyed(of).survey
    own = [np.bincount(of.train.of(k)[1], minlength=2) for k in (0, 1)]
    assert found[LABEL_COUNTS].tolist() == sum(own).tolist()
    assert LABEL_COUNTS not in surveyed(attrs.evolve(of, likelihood=Categorical())).survey


def test_outputs_are_the_networks_plus_the_log_prior():
    bare = separable()
    of = surveyed(attrs.evolve(bare, likelihood=Categorical(label_prior=STRENGTH)))
    x = of.train.of(0)[0][None]
    for client, prior in enumerate(priors_of(of)):
        bound = of.for_client(of.cohort([client], {}, 0))
        logits = bare.forward(bare.initial[None], x)
        expected = special.softmax(logits.detach().numpy() + np.log(prior), axis=-1)
        outputs = bound.forward(bound.initial[None], x)
        found = bound.likelihood.predictive(outputs[:, None]).draws[0]
        np.testing.assert_allclose(found.detach(), expected, rtol=1e-12)
        two = bound.forward(bound.initial.expand(2, -1), x.expand(2, -1, -1))
        torch.testing.assert_close(two[1], outputs[0])


def test_a_gradient_is_that_of_the_cross_entropy_with_the_log_prior():
    of = surveyed(separable(likelihood=Categorical(label_prior=STRENGTH)))
    cohort = of.cohort([0], {}, 0)
    inference = Map(local_epochs=1, batch_size=1000, optimiser="sgd", lr=0.1)
    broadcast = begin(Recipe(inference, Average(), Equal(), Fixed()), of)
    found = inference.fit(of.for_client(cohort), broadcast, cohort)

    w = of.initial.clone().requires_grad_()
    x, y = of.train.of(0)
    logits = torch.func.functional_call(of.network, of.layout.unflatten(w), (x,))
    shifted = logits + torch.tensor(np.log(priors_of(of)[0]))
    loss = -shifted.log_softmax(1)[torch.arange(len(y)), y].mean()
    (gradient,) = torch.autograd.grad(loss, w)
    torch.testing.assert_close(found.posterior.mean[0], (w - 0.1 * gradient).detach())
    torch.testing.assert_close(found.loss[0], loss.detach())


def replies(of, inference, clients=None, chunk=0, memories=()):
    recipe = Recipe(inference, Average(), Equal(), Fixed())
    of = surveyed(of, inference)
    with Local(workers=1, chunk=chunk).open(of, inference, 10) as session:
        session.restore(dict(memories))
        broadcast = begin(recipe, of)
        fitted = list(session.fit(broadcast, clients or of.clients))
        return fitted, list(session.evaluate(broadcast, clients or of.clients))


@pytest.mark.parametrize("inference", [Map(local_epochs=2), Variational(local_epochs=2)])
def test_without_a_label_prior_nothing_changes_to_the_bit(inference):
    found, expected = (replies(separable(likelihood=it), inference) for it in (Categorical(), None))
    assert not difference([r.posterior for r in found[0]], [r.posterior for r in expected[0]])
    assert [e.personal["nll"] for e in found[1]] == [e.personal["nll"] for e in expected[1]]
    of = separable()
    assert of.for_client(of.cohort([0, 1, 2][:1], {}, 0)) is of
    assert of.for_server() is of


def test_clients_that_are_trained_together_have_a_prior_each():
    of = separable(likelihood=Categorical(label_prior=STRENGTH))
    alone, together = (replies(of, Map(local_epochs=2), chunk=chunk)[0] for chunk in (1, 3))
    assert len(alone) == 3
    assert not difference([r.posterior for r in together], [r.posterior for r in alone])
    cohort = of.cohort(sorted(range(3), key=lambda k: -of.train.size(k)), {}, 0)
    with pytest.raises(ValueError, match="one client's; given"):
        of.for_client(cohort)


def test_a_session_fits_each_client_with_its_own_prior():
    inference = Variational(local_epochs=2)
    of = surveyed(separable(likelihood=Categorical(label_prior=STRENGTH)))
    broadcast = begin(Recipe(inference, Average(), Equal(), Fixed()), of)
    fitted, _ = replies(of, inference)
    for reply in fitted:
        cohort = of.cohort(reply.clients, {}, 0)
        expected = inference.fit(of.for_client(cohort), broadcast, cohort)
        assert not difference(reply.posterior, expected.posterior)
        bare = inference.fit(attrs.evolve(of, likelihood=Categorical()), broadcast, cohort)
        assert difference(reply.posterior, bare.posterior)


def test_evaluation_predicts_with_the_clients_prior_and_the_server_with_everybodys():
    of = separable(likelihood=Categorical(label_prior=STRENGTH))
    _, found = replies(of, Map())
    bound = surveyed(of)
    counts = counts_of(of)
    everybody = prior_by_hand([0, 0, 0], sum(counts), STRENGTH)
    for evaluation, prior in zip(found, priors_of(bound), strict=True):
        x, y = of.test.of(evaluation.client)
        logits = of.forward(of.initial[None], x[None])[0].detach().numpy()
        for sums, p in ((evaluation.personal, prior), (evaluation.shared, everybody)):
            expected = special.log_softmax(logits + np.log(p), axis=1)[np.arange(len(y)), y]
            assert float(sums["nll"]) == pytest.approx(-expected.sum(), rel=1e-6)


def test_a_client_held_out_of_training_has_the_prior_of_its_own_labels():
    of = problem(sizes=(7, 5, 4), novel=(2,), likelihood=Categorical(label_prior=STRENGTH))
    _, (found,) = replies(of, Map(local_epochs=1), clients=(2,))
    counts = [np.bincount(of.train.of(k)[1], minlength=2) for k in range(3)]
    prior = prior_by_hand(counts[2], counts[0] + counts[1], STRENGTH)
    x, y = of.test.of(2)
    logits = of.forward(of.initial[None], x[None])[0].detach().numpy()
    expected = special.log_softmax(logits + np.log(prior), axis=1)[np.arange(len(y)), y]
    assert float(found.personal["nll"]) == pytest.approx(-expected.sum(), rel=1e-6)


@pytest.mark.parametrize("assumed", ["client", "pooled", "uniform"])
def test_other_label_frequencies_can_be_assumed_in_predictions_and_not_in_training(assumed):
    likelihood = Categorical(label_prior=STRENGTH, predict_label_prior=assumed)
    of = surveyed(separable(likelihood=likelihood))
    cohort, (own, *_) = of.cohort([0], {}, 0), priors_of(of)
    pooled = prior_by_hand([0, 0, 0], sum(counts_of(of)), STRENGTH)
    expected = {"client": np.log(own), "pooled": np.log(pooled), "uniform": np.zeros(3)}
    offset = of.for_client(cohort, predicting=True).offset
    found = np.zeros(3) if offset is None else offset
    np.testing.assert_allclose(found, expected[assumed], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(of.for_client(cohort).offset, np.log(own), rtol=1e-12)


@pytest.mark.parametrize("strength", [0.0, -1.0, float("nan")])
def test_a_strength_that_is_none_is_refused_by_name(strength):
    with pytest.raises(OptionError, match=r"label_prior: .* is not allowed; allowed: .*above 0"):
        Categorical(label_prior=strength)


def test_a_regression_has_no_labels_to_count():
    assert not GaussianNoise().counts_labels
    assert GaussianNoise().offset(torch.ones(2), torch.ones(2), predicting=True) is None
    with pytest.raises(OptionError, match="label_prior"):
        bflcore.run("fedvi", data="boston", options={"likelihood.label_prior": 1.0}, rounds=1)
