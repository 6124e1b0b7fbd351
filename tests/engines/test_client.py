"""What a client does in a round: fit, personalise, predict, sum its metrics."""

import re
import sys

import attrs
import pytest
import torch
from sklearn.metrics import roc_auc_score

from bflcore import (
    Average,
    Equal,
    Fixed,
    Map,
    Predictive,
)
from bflcore.engines.local import Local
from bflcore.experiments.surveys import calibrate
from bflcore.problem import metrics
from bflcore.problem.base import Shares
from bflcore.problem.calibration.base import answer, fit
from bflcore.problem.calibration.conformal import Conformal
from bflcore.problem.calibration.outliers import Outliers
from bflcore.problem.calibration.temperature import Temperature
from bflcore.rounds import Recipe, begin
from bflcore.testing.problems import difference, problem


def test_evaluation_blames_its_client():
    @attrs.frozen(kw_only=True)
    class Blind(Map):
        """Cannot predict."""

        def predict(self, problem, broadcast, cohort, x):
            raise RuntimeError("dark")

    of, inference = problem(), Blind()
    recipe = Recipe(inference, Average(), Equal(), Fixed())
    with Local(workers=1).open(of, inference, 10) as session:
        found = list(session.evaluate(begin(recipe, of), (0, 2)))
    line = Blind.predict.__code__.co_firstlineno + 1
    assert [str(error) for error in found] == [
        f"client {client} failed in evaluate: RuntimeError: dark at engines/test_client.py:{line}"
        for client in (0, 2)
    ]


def test_the_shared_model_is_evaluated_only_where_it_is_complete():
    for sharing, complete in (("all", True), ("body", False), ("none", False)):
        of, inference = problem(sharing=sharing), Map(local_epochs=1)
        recipe = Recipe(inference, Average(), Equal(), Fixed())
        with Local(workers=1).open(of, inference, 10) as session:
            found = list(session.evaluate(begin(recipe, of), of.clients))
        assert [e.shared is not None for e in found] == [complete] * 3


def test_a_novel_client_adapts_its_head_before_it_predicts():
    of, inference = problem(sharing="body", novel=(2,)), Map(local_epochs=60, lr=0.05)
    recipe = Recipe(inference, Average(), Equal(), Fixed())
    with Local(workers=1).open(of, inference, 10) as session:
        broadcast = begin(recipe, of)
        (adapted,) = session.evaluate(broadcast, (2,))
        strangers = attrs.evolve(of, novel=())
    with Local(workers=1).open(strangers, inference, 10) as session:
        (untouched,) = session.evaluate(broadcast, (2,))
    assert float(adapted.personal["nll"]) < float(untouched.personal["nll"])


def with_validation(of, sizes):
    """Let clients validate on copies of their first samples."""
    rows = [list(range(of.train.start[k], of.train.start[k] + n)) for k, n in enumerate(sizes)]
    return attrs.evolve(of, validation=Shares.gather(of.train.x, of.train.y, rows))


@pytest.mark.parametrize("workers", [1, 2])
def test_validation_samples_are_evaluated_as_test_samples_would_be(workers):
    of, inference = problem(), Map(local_epochs=1)
    held = with_validation(of, (3, 2, 0))
    as_test = attrs.evolve(of, test=held.validation)
    broadcast = begin(Recipe(inference, Average(), Equal(), Fixed()), of)
    with Local(workers=workers).open(held, inference, 10) as session:
        found = list(session.evaluate(broadcast, of.clients))
    with Local(workers=1).open(as_test, inference, 10) as session:
        expected = list(session.evaluate(broadcast, of.clients))
    assert [e.client for e in found if not e.validation] == [0, 1, 2]
    validated = [attrs.evolve(e, validation=False) for e in found if e.validation]
    assert [e.client for e in validated] == [0, 1]
    assert not difference(validated, expected)


def test_a_client_without_test_samples_can_still_validate():
    of, inference = problem(), Map(local_epochs=1)
    nobody = Shares.gather(of.test.x, of.test.y, [[]] * 3)
    held = attrs.evolve(with_validation(of, (2, 2, 1)), test=nobody)
    with Local(workers=1).open(held, inference, 10) as session:
        recipe = Recipe(inference, Average(), Equal(), Fixed())
        found = list(session.evaluate(begin(recipe, held), held.clients))
    assert [(e.client, e.validation) for e in found] == [(0, True), (1, True), (2, True)]


def test_a_prediction_in_closed_form_is_what_is_evaluated():
    @attrs.frozen(kw_only=True)
    class Sure(Map):
        """Predicts the first class; its draws are undecided."""

        def predict(self, problem, broadcast, cohort, x):
            closed = torch.tensor([0.9, 0.1]).expand(1, x.shape[1], 2)
            draws = torch.stack([closed, closed.flip(-1)], dim=1)
            return Predictive(draws, closed_form=closed)

    of, inference = problem(), Sure()
    recipe = Recipe(inference, Average(), Equal(), Fixed())
    with Local(workers=1).open(of, inference, 10) as session:
        (found,) = session.evaluate(begin(recipe, of), (0,))
    y = of.test.of(0)[1]
    result = metrics.metrics_of(found.personal)
    assert result["accuracy"] == pytest.approx(float((y == 0).double().mean()))
    assert result["epistemic"] == pytest.approx(2 * 0.4**2)  # the variances of 0.9, 0.1


@pytest.mark.parametrize("workers", [1, 2])
def test_only_memories_that_personalisation_changes_are_given(workers):
    of, inference = problem(sharing="body", novel=(2,)), Map(local_epochs=2, lr=0.05)
    broadcast = begin(Recipe(inference, Average(), Equal(), Fixed()), of)
    with Local(workers=workers).open(of, inference, 10) as session:
        found = list(session.personalise(broadcast, (0, 1, 2)))
    assert [one.client for one in found] == [0, 1, 2]
    assert [one.memory is None for one in found] == [True, True, False]
    # The novel client's head, with the body that was sent, is the model that is evaluated.
    own = {name: tensor[None] for name, tensor in found[2].memory.items()}
    cohort = of.cohort([2], own, 0)
    with Local(workers=1).open(of, inference, 10) as session:
        (evaluated,) = session.evaluate(broadcast, (2,))
    x, y = of.test.of(2)
    draws = inference.predict(of, broadcast, cohort, x[None].clone()).draws[0]
    assert metrics.classification_sums(draws, y)["nll"].equal(evaluated.personal["nll"])


def test_a_client_that_cannot_personalise_is_blamed():
    @attrs.frozen(kw_only=True)
    class Stubborn(Map):
        """Cannot personalise."""

        def personalise(self, problem, broadcast, cohort):
            raise RuntimeError("no")

    of, inference = problem(), Stubborn()
    broadcast = begin(Recipe(inference, Average(), Equal(), Fixed()), of)
    with Local(workers=1).open(of, inference, 10) as session:
        (found,) = session.personalise(broadcast, (1,))
    reason = "RuntimeError: no at engines/test_client.py:[0-9]+"
    assert re.fullmatch(f"client 1 failed in personalise: {reason}", str(found))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda r: attrs.evolve(r, posterior=r.posterior.map(lambda t: t.requires_grad_())),
            "inference changed returned a posterior whose mean requires grad; detach it",
        ),
        (
            lambda r: attrs.evolve(r, clients=tuple(k + 1 for k in r.clients)),
            r"inference changed returned clients \(1,\) for \(0,\)",
        ),
    ],
    ids=["gradient", "order"],
)
def test_a_result_that_cannot_be_sent_or_is_mixed_up_is_the_clients_failure(change, reason):
    @attrs.frozen(kw_only=True)
    class Changed(Map):
        """Returns another result."""

        name = "changed"

        def fit(self, problem, broadcast, cohort):
            return change(super().fit(problem, broadcast, cohort))

    of, inference = problem(), Changed()
    with Local(workers=1).open(of, inference, 1) as session:
        (found,) = session.fit(begin(Recipe(inference, Average(), Equal(), Fixed()), of), (0,))
    assert re.search(reason, str(found))


def calibrated(of, sizes=(4, 3, 0), **options):
    """Let clients calibrate on copies of their first samples."""
    rows = [list(range(of.train.start[k], of.train.start[k] + n)) for k, n in enumerate(sizes)]
    samples = Shares.gather(of.train.x, of.train.y, rows)
    calibrators = (Temperature(), Conformal(**options), Outliers())
    return attrs.evolve(of, calibration=samples, calibrators=calibrators)


@pytest.mark.parametrize("workers", [1, 2])
def test_calibration_sums_are_over_a_clients_own_samples(workers):
    of, inference = calibrated(problem()), Map(local_epochs=1)
    broadcast = begin(Recipe(inference, Average(), Equal(), Fixed()), of)
    with Local(workers=workers).open(of, inference, 10) as session:
        found = list(session.calibrate(broadcast, of.clients))
    assert [reply.client for reply in found] == [0, 1, 2]
    for reply in found[:2]:
        x, y = of.calibration.of(reply.client)
        memory = {name: t[None] for name, t in inference.initial_memory(of).items()}
        cohort = of.cohort([reply.client], memory, 0)
        made = inference.predict(of, broadcast, cohort, x[None])
        assert not difference(reply.sums, answer(of.calibrators, [(made, y)]))
    nothing = found[2].sums
    assert {n: t.shape for n, t in nothing.items()} == {n: t.shape for n, t in reply.sums.items()}
    assert not any(bool(t.any()) for t in nothing.values())


@pytest.mark.parametrize("scope", ["federated", "client"])
def test_once_there_is_a_total_predictions_are_evaluated_as_calibrated(scope):
    of, inference = calibrated(problem(), scope=scope), Map(local_epochs=1)
    broadcast = begin(Recipe(inference, Average(), Equal(), Fixed()), of)
    with Local(workers=1).open(of, inference, 10) as session:
        assert not any(e.calibrated for e in session.evaluate(broadcast, of.clients))
        assert not any(r.calibration for r in session.personalise(broadcast, of.clients))
        broadcast, _ = calibrate(of, session, broadcast)
        evaluations = list(session.evaluate(broadcast, of.clients))
        kept = list(session.personalise(broadcast, of.clients))
        own = [reply.sums for reply in session.calibrate(broadcast, of.clients)]
    used = [{n: t for n, t in sums.items() if n.startswith("conformal.")} for sums in own]
    assert not difference([r.calibration for r in kept], used if scope == "client" else [{}] * 3)
    for evaluation, sums in zip(evaluations, own, strict=True):
        total = broadcast.calibration
        conformal = fit(of.calibrators, evaluation.client, sums, total)[1]
        x, y = of.test.of(evaluation.client)
        memory = {name: t[None] for name, t in inference.initial_memory(of).items()}
        made = inference.predict(of, broadcast, of.cohort([evaluation.client], memory, 0), x[None])
        inside = conformal.region(made, 0.9)
        found = metrics.metrics_of(evaluation.calibrated)
        assert found["set_size90"] == float(inside.sum()) / len(y)
        assert found["accuracy"] == metrics.metrics_of(evaluation.personal)["accuracy"]


def test_foreign_samples_are_compared_in_the_last_round_and_change_nothing_else():
    of, inference = attrs.evolve(problem(), rounds=2), Map(local_epochs=1)
    foreign = attrs.evolve(of, foreign=of.test.x[:3] + 50)
    replies = {}
    for name, each in (("without", of), ("with", foreign)):
        broadcast = begin(Recipe(inference, Average(), Equal(), Fixed()), each)
        with Local(workers=1).open(each, inference, 10) as session:
            for number in (1, 2):
                now = attrs.evolve(broadcast, round=number)
                replies[name, number] = list(session.evaluate(now, each.clients))
    assert all(e.ood is None for e in (*replies["with", 1], *replies["without", 2]))
    for plain, compared in zip(replies["without", 2], replies["with", 2], strict=True):
        assert not difference(dict(compared.personal), dict(plain.personal))
        own, others = compared.ood["strangeness"].sum(1).tolist()
        assert (own, others) == (int(plain.personal["examples"]), 3)
        x = torch.cat([foreign.test.of(plain.client)[0], foreign.foreign])[None]
        members = foreign.cohort([plain.client], {}, 2)
        broadcast = attrs.evolve(broadcast, round=2)
        p = inference.predict(foreign, broadcast, members, x).mean[0].double()
        entropy = -(p * p.log()).sum(1)
        exact = roc_auc_score([0] * own + [1] * others, entropy)
        assert metrics.metrics_of(compared.ood)["auroc"] == pytest.approx(exact, abs=0.1)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda _: None, "returned NoneType; return a LocalResult"),
        (lambda _: [1], "returned list; return a LocalResult"),
        (lambda r: attrs.evolve(r, clients=3), "TypeError"),
        (lambda r: attrs.evolve(r, clients=([3],)), r"returned clients \(\[3\],\) for"),
        (lambda r: attrs.evolve(r, memory={"m": [1.0]}), "memory whose m is list; return a torch"),
        (lambda _: sys.exit(0), "SystemExit: 0"),
        (lambda r: attrs.evolve(r, statistics={"s": torch.ones(1, requires_grad=True)}), "grad"),
    ],
)
def test_whatever_fit_returns_or_does_costs_its_client_only(returned, reason):
    @attrs.frozen(kw_only=True)
    class Odd(Map):
        """Returns something else for client 1."""

        name = "odd"

        def fit(self, problem, broadcast, cohort):
            result = super().fit(problem, broadcast, cohort)
            return returned(result) if cohort.clients == (1,) else result

    of, inference = problem(), Odd(local_epochs=1)
    with Local(workers=1).open(of, inference, 1) as session:
        found = list(session.fit(begin(Recipe(inference, Average(), Equal(), Fixed()), of), (0, 1)))
    assert found[0].clients == (0,)
    assert re.search(reason, str(found[1]))
    assert found[1].client == 1


@pytest.mark.parametrize("stage", ["predict", "personalise"])
def test_an_inference_that_ends_the_program_at_the_evaluation_costs_its_client_only(stage):
    @attrs.frozen(kw_only=True)
    class Ending(Map):
        """Ends the program."""

        name = "ending"

    def end(*_):
        raise SystemExit(0)

    setattr(Ending, stage, end)
    of, inference = problem(), Ending(local_epochs=1)
    with Local(workers=1).open(of, inference, 1) as session:
        broadcast = begin(Recipe(inference, Average(), Equal(), Fixed()), of)
        found = list(session.evaluate(broadcast, (0, 1)))
    assert [failure.client for failure in found] == [0, 1]
