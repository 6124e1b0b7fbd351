"""Whatever a client sends: it is refused by name, and the others' posterior stays what it is."""

from __future__ import annotations

import os
from functools import cache

import attrs
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from bflcore import (
    Average,
    Broadcast,
    Equal,
    Examples,
    Fixed,
    HyperUpdate,
    Map,
    Point,
    Variational,
    component,
)
from bflcore.engines.base import Wrapped
from bflcore.engines.local import Local
from bflcore.engines.screening import screen_evaluations
from bflcore.errors import ClientError
from bflcore.experiments.records import Records
from bflcore.messages import Evaluation
from bflcore.problem import metrics
from bflcore.problem.ood import ood_sums
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.problems import Replies, gaussian, problem, reply

SIZE = 5
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


@component
class Noise(HyperUpdate):
    """Keeps the mean of a statistic ``noise`` of three numbers."""

    name = "noise"
    families = ()

    def summarise(self, result, weights, broadcast):
        if result.statistics["noise"].shape[1:] != (3,):
            raise ValueError("noise is not three numbers")
        return {"noise": result.statistics["noise"].sum(0)}

    def update(self, broadcast, fused, total):
        return attrs.evolve(broadcast, round=broadcast.round + 1, start=fused, hyper=total)


def honest(client, dtype=torch.float32):
    noise = torch.full((1, 3), 0.5 + client, dtype=dtype)
    posterior = gaussian(1, SIZE, seed=client, dtype=dtype)
    return reply([client], posterior, statistics={"noise": noise})


SENT = Broadcast(
    0, gaussian(SIZE, seed=50, dtype=torch.float32), gaussian(SIZE, dtype=torch.float32)
)
RECIPE = Recipe(Variational(), Average(), Examples(), Noise())


def outcome(replies):
    done = run_round(RECIPE, Replies(*replies), SENT, (0, 1, 2))
    return done, {**done.broadcast.start.pack(), **done.broadcast.hyper}


def changed(result, field, value):
    """Return the result with another value of one of its fields, wherever that is."""
    if field in ("mean", "variance"):
        return attrs.evolve(result, posterior=attrs.evolve(result.posterior, **{field: value}))
    if field == "noise":
        return attrs.evolve(result, statistics={"noise": value})
    if field == "kept":
        return attrs.evolve(result, memory={"kept": value})
    return attrs.evolve(result, **{field: value})


FLOATS = ("mean", "variance", "noise", "kept", "loss")
BAD = [float("nan"), float("inf"), -float("inf"), 1e16, -3e38]
NEGATIVE = [-1e-45, -1e-30, -1.0, -1e10]
SUBNORMAL = [1e-45, 1e-40, 1.1e-38]


@st.composite
def malformed(draw, client):
    """A result of one client that is wrong in one respect, drawn by its structure."""
    good = attrs.evolve(honest(client), memory={"kept": torch.ones(1, 4)})
    values = {
        **{name: getattr(good.posterior, name) for name in ("mean", "variance")},
        "noise": good.statistics["noise"],
        "kept": good.memory["kept"],
        "loss": good.loss,
        "examples": good.examples,
    }
    kind = draw(
        st.sampled_from(
            [
                "value",
                "negative",
                "subnormal",
                "shape",
                "dtype",
                "lost",
                "named",
                "examples",
                "family",
                "no tensor",
            ]
        )
    )
    if kind in ("value", "negative", "subnormal"):
        field = draw(st.sampled_from(FLOATS)) if kind == "value" else "variance"
        allowed = {"value": BAD, "negative": NEGATIVE, "subnormal": SUBNORMAL}[kind]
        wrong = values[field].clone()
        wrong.view(-1)[draw(st.integers(0, wrong.numel() - 1))] = draw(st.sampled_from(allowed))
        return changed(good, field, wrong)
    if kind == "shape":
        field = draw(st.sampled_from([name for name in values if name != "kept"]))
        shape = draw(
            st.lists(st.integers(0, 6), max_size=3)
            .map(tuple)
            .filter(lambda s: s != tuple(values[field].shape))
        )
        return changed(good, field, torch.ones(shape, dtype=values[field].dtype))
    if kind == "dtype":
        field = draw(st.sampled_from(["mean", "variance", "loss", "examples"]))
        others = {torch.float64, torch.float16, torch.int64, torch.bool} - {values[field].dtype}
        allowed = [d for d in others if (field, d.is_floating_point) != ("loss", True)]
        return changed(
            good, field, values[field].to(draw(st.sampled_from(sorted(allowed, key=str))))
        )
    if kind == "lost":
        return attrs.evolve(good, statistics={})
    if kind == "named":
        return attrs.evolve(good, statistics={draw(st.text(max_size=5)): values["noise"]})
    if kind == "examples":
        count = draw(st.sampled_from([0, -1, -(2**63), 2**62]))
        return changed(good, "examples", torch.tensor([count]))
    if kind == "family":
        return attrs.evolve(
            good, posterior=draw(st.sampled_from([Point(values["mean"]), None, {}]))
        )
    field = draw(st.sampled_from(sorted(values)))
    return changed(
        good, field, draw(st.sampled_from([None, "text", 3.0, [1.0], np.ones((1, SIZE))]))
    )


@cache
def without(guilty):
    return outcome([honest(client) for client in range(3) if client != guilty])[1]


@settings(max_examples=10_000 if THOROUGH else 1_000)
@given(st.data())
def test_whatever_is_wrong_the_client_is_named_and_the_posterior_is_the_others(data):
    guilty = data.draw(st.integers(0, 2), "guilty")
    bad = data.draw(malformed(guilty), "result")
    others = [client for client in range(3) if client != guilty]
    replies = [bad if client == guilty else honest(client) for client in range(3)]
    done, found = outcome(replies)
    assert [error.client for error in done.dropped] == [guilty]
    assert done.dropped[0].reason
    assert "\n" not in done.dropped[0].reason
    assert done.replied == tuple(others)
    expected = without(guilty)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.int64, torch.uint8])
def test_statistics_of_other_kinds_of_number_are_refused(dtype):
    odd = changed(honest(1), "noise", torch.ones(1, 3).to(dtype))
    done, found = outcome([honest(0), odd, honest(2)])
    assert [error.client for error in done.dropped] == [1]
    assert all(torch.equal(found[name], tensor) for name, tensor in without(1).items())


def test_a_memory_may_hold_truths():
    good = attrs.evolve(honest(1), memory={"mask": torch.tensor([[True, False]])})
    done, _ = outcome([honest(0), good, honest(2)])
    assert done.replied == (0, 1, 2)


@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-40, 1e14, -1e14])
def test_unusual_means_are_let_in(value):
    good = honest(1)
    good.posterior.mean[0, 2] = value
    done, _ = outcome([honest(0), good, honest(2)])
    assert done.replied == (0, 1, 2)


def test_statistics_of_another_form_than_the_others_are_refused():
    @component
    class Whatever(Noise):
        """Sums what it gets."""

        name = "whatever"

        def summarise(self, result, weights, broadcast):
            return {name: tensor.sum(0) for name, tensor in result.statistics.items()}

    wide = attrs.evolve(honest(1), statistics={"noise": torch.ones(1, 4)})
    recipe = attrs.evolve(RECIPE, hyper=Whatever())
    done = run_round(recipe, Replies(honest(0), wide, honest(2)), SENT, (0, 1, 2))
    (dropped,) = done.dropped
    assert dropped.client == 1
    assert "as most clients'" in dropped.reason


def test_a_client_counts_once_and_only_when_asked():
    done = run_round(RECIPE, Replies(honest(0), honest(0), honest(7)), SENT, (0, 1))
    assert done.replied == (0,)
    assert [(e.client, e.reason) for e in done.dropped] == [
        (0, "it replied twice"),
        (7, "it was not asked"),
    ]


SUMS = {"examples": torch.tensor(4), "correct": torch.tensor(3), "bins": torch.zeros(10)}


@pytest.mark.parametrize(
    "wrong",
    [
        Evaluation(1, {}, None),
        Evaluation(1, SUMS | {"bins": torch.zeros(9)}, None),
        Evaluation(1, SUMS | {"examples": torch.tensor(0)}, None),
        Evaluation(1, SUMS | {"examples": torch.tensor(float("nan"))}, None),
        Evaluation(1, SUMS | {"examples": torch.zeros(2)}, None),
        Evaluation(1, SUMS | {"more": torch.tensor(1)}, None),
        Evaluation(1, SUMS, SUMS),
        Evaluation(1, SUMS, None, ood={"strangeness": torch.zeros(2, 3)}),
        Evaluation(1, SUMS, None, {"lambda": {0.0: SUMS}}),
        Evaluation(1, SUMS | {"bins": torch.zeros(10, dtype=torch.float64)}, None),
    ],
)
def test_an_evaluation_that_cannot_be_added_to_the_others_is_its_clients_error(wrong):
    lost = ClientError(3, "evaluate", "gone")
    fine = [Evaluation(client, SUMS, None) for client in (0, 2)]
    found = screen_evaluations([fine[0], wrong, fine[1], lost], range(4))
    assert [found[0], found[2], found[3]] == [*fine, lost]
    assert (found[1].client, found[1].stage) == (1, "evaluate")


def test_evaluations_with_and_without_foreign_samples_may_meet():
    ood = ood_sums(torch.rand(3), torch.rand(4))
    found = [Evaluation(0, SUMS, None, ood=ood), Evaluation(0, SUMS, None, validation=True)]
    assert screen_evaluations(found, [0]) == found


def test_figures_of_a_model_that_diverged_are_let_through():
    found = Evaluation(0, SUMS | {"correct": torch.tensor(float("nan"))}, None)
    assert screen_evaluations([found], [0]) == [found]


class Lying(Wrapped):
    """Client 1 sends sums without their names."""

    def evaluate(self, broadcast, clients):
        for found in self.session.evaluate(broadcast, clients):
            yield attrs.evolve(found, personal={}) if found.client == 1 else found


def test_a_round_is_evaluated_without_the_client_that_sends_nonsense():
    of, inference = problem(), Map(local_epochs=1)
    broadcast = begin(Recipe(inference, Average(), Equal(), Fixed()), of)
    with Local(workers=1).open(of, inference, 10) as session:
        replies = screen_evaluations(
            list(Lying(session).evaluate(broadcast, of.clients)), of.clients
        )
    record = Records("fedavg").add_evaluation(1, 0.5, {}, replies, of.novel)
    assert [(entry["client"], entry["stage"]) for entry in record["dropped"]] == [(1, "evaluate")]
    assert 0 <= record["personal.accuracy"]["pooled"] <= 1


def test_evaluations_that_are_impossible_repeated_or_of_strangers_are_left_out():
    y = torch.tensor([0, 1, 2, 1])
    right = metrics.classification_sums(torch.rand(3, 4, 3).softmax(-1), y)
    wrong = {**right, "accuracy": torch.tensor(1e9, dtype=torch.float64)}
    replies = [Evaluation(client, right, None) for client in (0, 1, 1, 2, 77)]
    replies[3] = Evaluation(2, right, wrong)
    replies[4] = Evaluation(77, right, right)
    replies[0] = attrs.evolve(replies[0], shared=right)
    replies[1] = attrs.evolve(replies[1], shared=right)
    replies[2] = attrs.evolve(replies[2], shared=right)
    found = screen_evaluations(replies, (0, 1, 2))
    assert found[:2] == replies[:2]
    assert [str(error) for error in found[2:]] == [
        "client 1 failed in evaluate: it was evaluated twice",
        "client 2 failed in evaluate: accuracy is 1e+09 for 4 samples",
    ]
