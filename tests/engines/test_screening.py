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
from bflcore.messages import Answer, Evaluation, LocalResult
from bflcore.problem import metrics
from bflcore.problem.ood import ood_sums
from bflcore.randomness import SERVER
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
OTHER_NAMES = st.text(max_size=5).filter(lambda name: name != "noise")
SUBNORMAL = [1e-45, 1e-40, 1.1e-38]


class Odd(torch.Tensor):
    """A tensor whose arithmetic could be anybody's."""


@attrs.frozen(eq=False)
class Overridden(LocalResult):
    """A result that answers differently each time."""

    def select(self, rows):
        raise SystemExit


ODD = [  # what may not be taken for a plain tensor of real numbers
    lambda t: t.to(torch.complex64),
    lambda t: t.to(torch.float32).requires_grad_(),
    lambda t: torch.nn.Parameter(t.float()),
    lambda t: t.as_subclass(Odd),
    lambda t: t.to_sparse(),
    lambda t: t.to("meta"),
    lambda t: t[None].expand(3, *t.shape),  # a view with more clients than there are
    lambda t: t[:0],
    lambda t: np.asarray(t, object),
    lambda t: torch.tensor(1.0),
]
NO_RESULTS = [  # what an engine may hand on in the place of a result
    lambda good: None,
    lambda good: LocalResult,
    lambda good: {"clients": good.clients, "posterior": good.posterior},
    lambda good: "result",
    lambda good: [good],
    lambda good: object(),
    lambda good: Answer(good.clients[0], {}),
    lambda good: Evaluation(good.clients[0], {}, None),
    lambda good: Overridden(**{f.name: getattr(good, f.name) for f in attrs.fields(LocalResult)}),
    lambda good: ClientError(good.clients[0], "fit", "x" * 10_000),
    lambda good: ClientError([0], "fit", "it does not say who it is"),
    lambda good: ClientError(None, None, None),
]


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
                "key",
                "kind",
                "reply",
                "clients",
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
        return attrs.evolve(good, statistics={draw(OTHER_NAMES): values["noise"]})
    if kind == "examples":
        count = draw(st.sampled_from([0, -1, -(2**63), 2**62]))
        return changed(good, "examples", torch.tensor([count]))
    if kind == "family":
        return attrs.evolve(
            good, posterior=draw(st.sampled_from([Point(values["mean"]), None, {}]))
        )
    if kind == "key":
        group = draw(st.sampled_from(["statistics", "memory"]))
        key = draw(st.sampled_from([0, None, 1.5, True, b"noise", ("noise",), int]))
        return attrs.evolve(good, **{group: {**getattr(good, group), key: torch.ones(1, 3)}})
    field = draw(st.sampled_from(sorted(values)))
    if kind == "kind":
        return changed(good, field, draw(st.sampled_from(ODD))(values[field]))
    if kind == "reply":
        return draw(st.sampled_from(NO_RESULTS))(good)
    if kind == "clients":
        named = draw(st.sampled_from([None, (), [client], "1", ([client],), (True,), (1.0,), {1}]))
        return attrs.evolve(good, clients=named)
    return changed(
        good, field, draw(st.sampled_from([None, "text", 3.0, [1.0], np.ones((1, SIZE))]))
    )


def names(reply, client):
    """Return whether a reply, whatever it is, says in the right place whose it is."""
    if isinstance(reply, ClientError):
        return type(reply.client) is int
    return type(reply) is LocalResult and repr(reply.clients) == repr((client,))


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
    (named,) = [error.client for error in done.dropped]
    assert named == guilty or (named == SERVER and not names(bad, guilty))
    assert 0 < len(done.dropped[0].reason) <= 2000
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


@st.composite
def spoilt(draw, good):
    """An evaluation, or what is in the place of one, that is wrong in one respect."""
    kind = draw(st.sampled_from(["reply", "client", "group", "name", "sum", "value", "flag"]))
    if kind == "reply":
        return draw(
            st.sampled_from(
                [None, Evaluation, "evaluation", {}, [good], 3, honest(1), Answer(1, good.personal)]
            )
        )
    if kind == "client":
        return attrs.evolve(good, client=draw(st.sampled_from([None, [1], True, 1.0, "1", {}])))
    if kind == "flag":
        value = draw(st.sampled_from([None, "yes", [0], 2, torch.tensor([True, False])]))
        return attrs.evolve(good, validation=value)
    if kind == "group":
        group = draw(st.sampled_from(["personal", "shared", "curves", "calibrated", "ood"]))
        wrong = [3, "sums", [good.personal], {"examples": None}, {0: torch.ones(2)}, torch.ones(3)]
        wrong += [{"axis": 3}, {"axis": {0.5: 3}}, {"axis": {0.5: good.personal}}]
        return attrs.evolve(good, **{group: draw(st.sampled_from(wrong))})
    sums = dict(draw(st.sampled_from([good.personal, good.shared])))
    name = draw(st.sampled_from(sorted(sums)))
    if kind == "name":
        tensor = sums.pop(name)
        sums |= {draw(st.sampled_from([None, 0, "", name + " ", b"examples"])): tensor}
    elif kind == "sum":
        lost = [None, 3.0, "3", np.ones(3, object), Evaluation, sums[name].to("meta")]
        sums[name] = draw(st.sampled_from([*lost, *(odd(sums[name][None]) for odd in ODD[:-1])]))
    else:
        name = draw(st.sampled_from(["accuracy", "examples", "confusion", "bin_count", "ranks"]))
        sums[name] = sums[name].clone()
        whole = not sums[name].is_floating_point()
        wrong = [-1, 10**6] if whole else [-1.0, float("inf"), float("nan"), 1e12, -1e300]
        sums[name].view(-1)[draw(st.integers(0, sums[name].numel() - 1))] = draw(
            st.sampled_from(wrong)
        )
    return attrs.evolve(good, **{draw(st.sampled_from(["personal", "shared"])): sums})


@cache
def evaluated(client):
    y = torch.tensor([0, 1, 2, 1, 0])
    draws = torch.rand(3, 5, 3, generator=torch.Generator().manual_seed(client)).softmax(-1)
    found = metrics.classification_sums(draws, y)
    return Evaluation(client, found, {name: tensor.clone() for name, tensor in found.items()})


def line_of(replies, clients=4):
    record = Records("fedavg").add_evaluation(
        1, 0.5, {}, screen_evaluations(replies, range(clients)), ()
    )
    return {name: value for name, value in record.items() if name != "seconds"}


@settings(max_examples=10_000 if THOROUGH else 1_000)
@given(st.data())
def test_whatever_a_client_evaluates_the_others_figures_are_theirs(data):
    guilty = data.draw(st.integers(0, 3), "guilty")
    bad = data.draw(spoilt(evaluated(guilty)), "evaluation")
    others = [evaluated(client) for client in range(4) if client != guilty]
    found = line_of([bad if client == guilty else evaluated(client) for client in range(4)])
    (dropped,) = found.pop("dropped")
    named = type(bad) is Evaluation and type(bad.client) is int
    assert dropped["client"] == (guilty if named else SERVER)
    assert (dropped["stage"], bool(dropped["reason"])) == ("evaluate", True)
    expected = line_of(others)
    assert expected.pop("dropped") == []
    assert repr(found) == repr(expected)


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
