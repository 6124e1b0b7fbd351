"""The round loop: what is let in, what is fused, and what the server keeps."""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from torch import nn

from bflcore import (
    Aggregator,
    Average,
    Broadcast,
    ClientError,
    Continual,
    EmpiricalBayes,
    Equal,
    Examples,
    Fixed,
    Gaussian,
    Layout,
    LowRankGaussian,
    Map,
    Point,
    ProductOfChanges,
    Variational,
    Weighting,
    component,
)
from bflcore.engines.local import Local
from bflcore.engines.screening import screen
from bflcore.errors import OptionError, RoundError, RunError
from bflcore.rounds import Recipe, Sums, begin, run_round, sample_cohort
from bflcore.testing.problems import (
    Replies,
    first_broadcast,
    gaussian,
    generator,
    normal,
    problem,
    reply,
)

SIZE = 6


@component
class Together(Aggregator):
    """Averages, but only when it has everybody."""

    name = "together"
    families = ("gaussian",)

    def fuse(self, posteriors, weights, prior):
        return Average().fuse(posteriors, weights, prior)


@component
class NotLocal(Weighting):
    """Examples as a share of the round's total, which needs all clients."""

    name = "not-local"
    local = False

    def weigh(self, posteriors, examples, broadcast):
        return examples.double() / examples.sum()


@component
class Given(Weighting):
    """The same weight for everybody."""

    name = "given"
    weight: float = 0.0

    def weigh(self, posteriors, examples, broadcast):
        return torch.full((len(examples),), self.weight, dtype=torch.float64)


def recipe(aggregator=None, weighting=None, hyper=None, inference=None):
    return Recipe(
        inference or Variational(),
        aggregator or Average(),
        weighting or Examples(),
        hyper or Fixed(),
    )


def sent(dtype=torch.float64):
    return Broadcast(2, gaussian(SIZE, seed=50, dtype=dtype), gaussian(SIZE, seed=60, dtype=dtype))


def posteriors(clients, dtype=torch.float64):
    return gaussian(clients, SIZE, dtype=dtype)


def run(replies, broadcast=None, min_clients=1, clients=4, **parts):
    session = Replies(*replies)
    done = run_round(
        recipe(**parts), session, broadcast or sent(), tuple(range(clients)), min_clients
    )
    return done, session


def equal(left, right):
    return all(torch.equal(tensor, right.pack()[name]) for name, tensor in left.pack().items())


def close(left, right):
    for name, tensor in left.pack().items():
        torch.testing.assert_close(tensor, right.pack()[name])


def spoilt(field, value):
    spoilt = posteriors(3).map(torch.clone)
    getattr(spoilt, field)[1, 4] = value
    return reply([0, 1, 2], spoilt)


def alone(posterior, **fields):
    return reply([1], posterior, **fields)


GOOD = posteriors(3)

BAD = {
    "wrong family": (alone(Point(normal(1, SIZE))), "posterior is Point, not Gaussian"),
    "wrong shape": (alone(gaussian(1, SIZE + 1)), r"mean is torch.float64 \[7\], not .* \[6\]"),
    "wrong dtype": (alone(posteriors(1, torch.float32)), "mean is torch.float32"),
    "no client axis": (alone(gaussian(SIZE)), r"mean has 6 rows for 1 clients"),
    "nan mean": (alone(GOOD[[1]].map(lambda t: t * torch.nan)), "mean is not finite"),
    "negative variance": (
        alone(Gaussian(GOOD.mean[[1]], -GOOD.variance[[1]])),
        "variance is negative",
    ),
    "nan loss": (alone(GOOD[[1]], loss=[float("nan")]), "loss is nan"),
    "infinite loss": (alone(GOOD[[1]], loss=[float("inf")]), "loss is inf"),
    "nan statistic": (
        alone(GOOD[[1]], statistics={"noise": torch.tensor([torch.nan])}),
        "statistic noise is not finite",
    ),
    "an exception": (ClientError(1, "fit", "ValueError: no"), "ValueError: no"),
}


@pytest.mark.parametrize(("bad", "reason"), BAD.values(), ids=BAD)
def test_a_faulty_client_is_dropped_with_its_reason_and_the_others_count(bad, reason):
    done, session = run([reply([0], GOOD[[0]]), bad, reply([2], GOOD[[2]])])
    assert done.replied == (0, 2)
    assert session.stored == [0, 2]
    (dropped,) = done.dropped
    assert (dropped.client, dropped.stage) == (1, "fit")
    assert re.search(reason, dropped.reason)
    expected = Average().fuse(GOOD[[0, 2]], torch.tensor([10.0, 30.0]), sent().prior)
    close(done.broadcast.start, expected)


@pytest.mark.parametrize("field", ["mean", "variance"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_faulty_row_of_a_cohort_does_not_take_the_others_with_it(field, value):
    done, session = run([spoilt(field, value)])
    assert done.replied == (0, 2)
    assert session.stored == [0, 2]
    assert [(e.client, e.reason) for e in done.dropped] == [(1, f"{field} is not finite")]


def test_a_reply_with_fewer_rows_than_clients_drops_all_of_them():
    short = reply([0, 1, 2], GOOD[[0, 1]])
    found = list(screen(short, sent()))
    assert [e.client for e in found] == [0, 1, 2]
    assert {e.reason for e in found} == {"mean has 2 rows for 3 clients"}


@pytest.mark.parametrize("field", ["examples", "loss"])
def test_a_reply_that_lacks_a_number_for_some_client_is_dropped(field):
    good = reply([0, 1], GOOD[[0, 1]])
    lacking = attrs.evolve(good, **{field: getattr(good, field)[0]})
    found = list(screen(lacking, sent()))
    assert [(e.client, e.reason) for e in found] == [
        (0, f"{field} has no rows for 2 clients"),
        (1, f"{field} has no rows for 2 clients"),
    ]


def test_what_passes_the_screen_is_each_client_alone():
    first, second = screen(reply([4, 7], GOOD[[0, 1]]), sent())
    assert (first.clients, second.clients) == ((4,), (7,))
    assert equal(second.posterior, GOOD[[1]])
    assert (second.examples.tolist(), second.loss.tolist()) == ([80], [1.0])


def test_a_zero_variance_passes_the_screen():
    certain = Gaussian(GOOD.mean[[0]], torch.zeros(1, SIZE, dtype=torch.float64))
    done, _ = run([reply([0], certain)])
    assert done.replied == (0,)


def test_too_few_valid_results_end_the_run_and_say_why():
    replies = [reply([0], GOOD[[0]]), *(ClientError(k, "fit", "out of memory") for k in (1, 2, 3))]
    with pytest.raises(RunError) as failure:
        run(replies, min_clients=2)
    message = str(failure.value)
    assert message.startswith("round 3: 1 of 4 clients gave a valid result, 2 are needed")
    assert "--min-clients" in message
    assert "client 3 failed in fit: out of memory" in message
    assert "\n" not in message


def test_just_enough_valid_results_are_enough():
    done, _ = run([reply([0, 1], GOOD[[0, 1]]), ClientError(2, "fit", "late")], min_clients=2)
    assert done.replied == (0, 1)


@pytest.mark.parametrize("on", ["variance", "std"])
def test_folding_results_as_they_arrive_equals_fusing_all_of_them(on):
    rule = Average(on=on)
    done, _ = run([reply([k], GOOD[[k]]) for k in range(3)], aggregator=rule)
    expected = rule.fuse(GOOD, torch.tensor([10.0, 20.0, 30.0]), sent().prior)
    close(done.broadcast.start, expected)


@pytest.mark.parametrize("parts", [{"aggregator": Together()}, {"weighting": NotLocal()}])
def test_parts_that_wait_for_everybody_agree_with_those_that_stream(parts):
    replies = [reply([k], GOOD[[k]]) for k in range(3)]
    waited, _ = run(replies, hyper=EmpiricalBayes(), **parts)
    streamed, _ = run(replies, hyper=EmpiricalBayes())
    close(waited.broadcast.start, streamed.broadcast.start)
    close(waited.broadcast.prior, streamed.broadcast.prior)
    assert waited.bytes_up == streamed.bytes_up


@pytest.mark.parametrize("parts", [{}, {"aggregator": Together()}])
def test_how_clients_were_bundled_does_not_matter(parts):
    one_by_one, _ = run([reply([k], GOOD[[k]]) for k in range(3)], hyper=EmpiricalBayes(), **parts)
    bundled, _ = run(
        [reply([0, 1], GOOD[:2]), reply([2], GOOD[2:])], hyper=EmpiricalBayes(), **parts
    )
    assert equal(one_by_one.broadcast.start, bundled.broadcast.start)
    assert equal(one_by_one.broadcast.prior, bundled.broadcast.prior)
    assert attrs.asdict(one_by_one, filter=_is_a_count) == attrs.asdict(bundled, filter=_is_a_count)


def _is_a_count(attribute, value):
    return attribute.name in ("loss", "replied", "bytes_up", "bytes_down")


@pytest.mark.parametrize("parts", [{}, {"aggregator": Together()}, {"hyper": EmpiricalBayes()}])
@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weighting_that_gives_no_weights_is_refused(weight, parts):
    with pytest.raises(OptionError, match="weights: "):
        run([reply([0], GOOD[[0]])], weighting=Given(weight=weight), **parts)


def test_the_empirical_prior_is_that_of_all_clients():
    done, _ = run([reply([k], GOOD[[k]]) for k in range(3)], hyper=EmpiricalBayes())
    weights = [10.0, 20.0, 30.0]
    mean = np.average(GOOD.mean, axis=0, weights=weights)
    second = np.average(GOOD.variance + GOOD.mean.square(), axis=0, weights=weights)
    np.testing.assert_allclose(done.broadcast.prior.mean, mean)
    np.testing.assert_allclose(done.broadcast.prior.variance, second - mean**2)


def test_the_loss_is_the_mean_over_clients_that_count():
    replies = [reply([0, 1], GOOD[:2], loss=[1.0, 4.0]), reply([2], GOOD[2:], loss=[torch.nan])]
    done, _ = run(replies)
    assert done.loss == 2.5


def test_bytes_up_count_every_accepted_tensor_that_travels():
    statistics = {"noise": torch.zeros(3, 5, dtype=torch.float32)}
    with_memory = attrs.evolve(
        reply([0, 1, 2], GOOD, statistics=statistics), memory={"personal.mean": normal(3, 99)}
    )
    done, _ = run([with_memory, ClientError(3, "fit", "lost")])
    assert done.bytes_up == 3 * (2 * SIZE * 8 + 5 * 4)


def test_bytes_up_leave_out_the_structure_that_the_server_has():
    layout = Layout.of(nn.Linear(3, 2))
    start = LowRankGaussian.arbitrary(layout, 1, generator())[0]
    sent = LowRankGaussian.arbitrary(layout, 1, generator(1))
    recipe = Recipe(Map(), ProductOfChanges(), Equal(), Continual())
    done = run_round(recipe, Replies(reply([0], sent)), Broadcast(0, start, start), (0,))
    assert done.bytes_up == 8 * (2 * layout.total + 2 * 2)


def test_bytes_up_count_rejected_uploads_too():
    done, _ = run([spoilt("mean", torch.nan), ClientError(3, "fit", "no reply")])
    assert len(done.dropped) == 2
    assert done.bytes_up == 3 * (2 * SIZE * 8)


@pytest.mark.parametrize(("hyper", "sent_twice"), [(Fixed(), False), (Continual(), True)])
def test_the_first_prior_does_not_travel_while_it_stays(hyper, sent_twice):
    """Clients compute it; under `continual` the prior is the start, which is sent once anyway."""
    of, parts = problem(), recipe(inference=Variational(prior_sigma=2.0), hyper=hyper)
    broadcast = begin(parts, of)
    one = broadcast.start.mean.nbytes * 2
    with Local(workers=1).open(of, parts.inference, bins=10) as session:
        for _ in range(2):
            done = run_round(parts, session, broadcast, of.clients)
            assert done.bytes_down == len(of.clients) * one
            broadcast = done.broadcast
    assert equal(broadcast.prior, broadcast.start) == sent_twice


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_down_count_the_start_the_prior_and_the_state_for_every_client_asked(dtype):
    width = torch.finfo(dtype).bits // 8
    state = {"noise": torch.zeros(3, dtype=torch.float64)}
    broadcast = attrs.evolve(sent(dtype), hyper=state)
    done, _ = run([reply([0], posteriors(1, dtype))], broadcast, clients=4)
    assert done.bytes_down == 4 * (4 * SIZE * width + 3 * 8)


def test_a_prior_that_equals_the_start_is_not_sent_twice():
    start = gaussian(SIZE)
    twice = Broadcast(0, start, start.map(torch.clone))
    mean_only = Broadcast(0, start, Gaussian(start.mean.clone(), 2 * start.variance))
    assert run([reply([0], GOOD[[0]])], twice, clients=1)[0].bytes_down == 2 * SIZE * 8
    assert run([reply([0], GOOD[[0]])], mean_only, clients=1)[0].bytes_down == 3 * SIZE * 8


def stored(broadcast):
    """Return the broadcast as it comes back from tensors alone."""

    def copy(posterior):
        packed = {name: tensor.clone() for name, tensor in posterior.pack("x.").items()}
        return type(posterior).unpack(packed, "x.")

    state = {name: tensor.clone() for name, tensor in broadcast.hyper.items()}
    return Broadcast(broadcast.round, copy(broadcast.start), copy(broadcast.prior), state)


@pytest.mark.parametrize("hyper", [Fixed(), Continual(), EmpiricalBayes()])
def test_the_broadcast_is_all_that_the_server_keeps(hyper):
    parts = {"hyper": hyper, "clients": 3}
    first, _ = run([reply([0, 1, 2], GOOD)], **parts)
    again = [reply([0, 1, 2], gaussian(3, SIZE, seed=70))]
    straight, _ = run(again, first.broadcast, **parts)
    resumed, _ = run(again, stored(first.broadcast), **parts)
    assert straight.broadcast.round == resumed.broadcast.round == 4
    assert equal(straight.broadcast.start, resumed.broadcast.start)
    assert equal(straight.broadcast.prior, resumed.broadcast.prior)
    assert (straight.bytes_up, straight.bytes_down) == (resumed.bytes_up, resumed.bytes_down)


def test_a_round_leaves_the_broadcast_it_sent_as_it_was():
    broadcast = sent()
    before = stored(broadcast)
    run([reply([0, 1, 2], GOOD)], broadcast, hyper=EmpiricalBayes())
    assert broadcast.round == before.round
    assert equal(broadcast.start, before.start)
    assert equal(broadcast.prior, before.prior)


@pytest.mark.parametrize("sharing", ["all", "body", "head", "none"])
def test_the_first_broadcast_holds_only_what_travels(sharing):
    inference, of = Variational(prior_sigma=2.0), problem(sharing=sharing)
    first = begin(recipe(inference=inference), of)
    mine, prior = (q.split(of.layout)[0] for q in (inference.initial(of), inference.prior(of)))
    assert first.round == 0
    assert equal(first.start, mine)
    assert equal(first.prior, prior)
    assert first.start.mean.shape == (of.layout.shared_total,)


def test_two_rounds_are_federated_averaging_done_by_hand():
    of, inference = problem(), Map(lr=0.1, local_epochs=2, batch_size=3)
    parts = recipe(inference=inference)
    broadcast, by_hand = begin(parts, of), first_broadcast(inference, of)
    with Local(workers=1).open(of, inference, bins=10) as session:
        for _ in range(2):
            broadcast = run_round(parts, session, broadcast, of.clients).broadcast
            fitted = [
                inference.fit(of, by_hand, of.cohort([k], {}, by_hand.round)).posterior.mean[0]
                for k in of.clients
            ]
            mean = np.average(torch.stack(fitted), axis=0, weights=[7, 5, 2])
            by_hand = Broadcast(by_hand.round + 1, Point(torch.as_tensor(mean)), by_hand.prior)
    assert broadcast.round == 2
    torch.testing.assert_close(broadcast.start.mean, by_hand.start.mean)


def test_a_cohort_is_drawn_without_replacement_in_order():
    clients = (3, 5, 8, 13, 21, 34)
    for number in range(20):
        drawn = sample_cohort(clients, 4, seed=0, round=number)
        assert len(set(drawn)) == 4
        assert set(drawn) <= set(clients)
        assert list(drawn) == sorted(drawn)


def test_a_cohort_depends_on_the_seed_and_the_round_alone():
    clients = tuple(range(50))
    assert sample_cohort(clients, 10, 1, 2) == sample_cohort(clients, 10, 1, 2)
    assert sample_cohort(clients, 10, 1, 2) != sample_cohort(clients, 10, 1, 3)
    assert sample_cohort(clients, 10, 1, 2) != sample_cohort(clients, 10, 2, 2)


@pytest.mark.parametrize("size", [3, 4, 1000])
def test_a_cohort_of_all_clients_or_more_is_all_of_them(size):
    assert sample_cohort((2, 4, 6), size, 0, 0) == (2, 4, 6)


def test_every_client_is_drawn_equally_often():
    rounds = 1000
    drawn = [client for r in range(rounds) for client in sample_cohort(range(5), 2, 0, r)]
    counts = np.bincount(drawn, minlength=5)
    # Five standard deviations of a binomial of 1,000 trials at 2 in 5.
    assert np.abs(counts - 0.4 * rounds).max() < 5 * np.sqrt(rounds * 0.4 * 0.6)


def test_equal_weights_ignore_how_many_samples_clients_have():
    done, _ = run([reply([0, 1, 2], GOOD)], weighting=Equal())
    np.testing.assert_allclose(done.broadcast.start.mean, GOOD.mean.mean(0))


@component
class Reporting(Average):
    """Averages, and says of how many parameters."""

    name = "reporting"

    def report(self, state):
        return {"parameters": float(len(state.tensors["mean"]))}


@pytest.mark.parametrize("weighting", [Examples(), NotLocal()])
def test_a_round_records_what_its_aggregator_reports(weighting):
    done, _ = run([reply([0, 1, 2], GOOD)], aggregator=Reporting(), weighting=weighting)
    assert done.report == {"aggregator.parameters": float(SIZE)}
    assert run([reply([0], GOOD[[0]])], weighting=weighting)[0].report == {}


def test_a_round_records_what_its_clients_report():
    told = {"report.corrected": torch.tensor([2.0, 0.0, 5.0])}
    done, _ = run([reply([0, 1, 2], GOOD, statistics=told)], aggregator=Reporting())
    assert done.report == {"aggregator.parameters": float(SIZE), "inference.corrected": 7.0}


def many(clients):
    """Return replies of clients whose ids are neither consecutive nor from zero."""
    all_of_them = gaussian(clients, SIZE)  # float64: how sums are grouped shows in the last bits
    return {3 * k + 1: reply([3 * k + 1], all_of_them[[k]]) for k in range(clients)}


def blocks_of(replies, rule, block):
    """Return the sums of every block, each computed by itself, as what a worker would send."""
    ids, prior = sorted(replies), sent().prior
    for first in range(0, len(ids), block):
        sums = Sums(rule.start(prior))
        for client in ids[first : first + block]:
            result = replies[client]
            weights = Examples().weigh(result.posterior, result.examples, sent())
            hyper = EmpiricalBayes().summarise(result, weights, sent())
            sums = sums.add(rule, result, weights, hyper)
        yield pickle.dumps(sums.pack())


@pytest.mark.parametrize("block", [1, 4, 32])
@pytest.mark.parametrize("rule", [Average(), Together()], ids=["sums", "collects"])
def test_blocks_that_were_summed_elsewhere_give_the_same_to_the_bit(rule, block):
    replies, broadcast = many(11), sent()
    parts = recipe(aggregator=rule, hyper=EmpiricalBayes())
    done = run_round(parts, Replies(*replies.values()), broadcast, tuple(replies), block=block)
    total = Sums(rule.start(broadcast.prior))
    for sent_by_a_worker in blocks_of(replies, rule, block):
        received = Sums.unpack(pickle.loads(sent_by_a_worker), broadcast.prior)
        total = total.merge(rule, received)
    start = rule.finish(total.state)
    assert equal(done.broadcast.start, start)
    following = EmpiricalBayes().update(broadcast, start, total.hyper)
    assert equal(done.broadcast.prior, following.prior)


def test_clients_are_summed_in_blocks_of_the_sorted_cohort_and_blocks_in_order():
    merged = []

    @component
    class Noted(Together):
        """Notes the weights of the states that are merged."""

        name = "noted"

        def merge(self, left, right):
            def weights(state):
                return [int(t) for name, t in state.tensors.items() if name.endswith("weights")]

            merged.append((weights(left), weights(right)))
            return super().merge(left, right)

    replies = many(5)
    del replies[4]  # drops out; the others stay in their blocks
    parts = recipe(aggregator=Noted())
    run_round(parts, Replies(*replies.values()), sent(), (1, 4, 7, 10, 13), block=2)
    assert merged == [
        ([], [20]),  # the first block is client 1, who weighs 20, since client 4 dropped out
        ([], [20]),
        ([], [80]),
        ([80], [110]),
        ([20], [80, 110]),
        ([], [140]),
        ([20, 80, 110], [140]),
    ]


@pytest.mark.parametrize("weighting", [Examples(), NotLocal()])
def test_every_client_is_summarised_once(weighting):
    clients = []

    @component
    class Noted(EmpiricalBayes):
        """Notes whom it summarises, and under which weight."""

        name = "noted"

        def summarise(self, result, weights, broadcast):
            clients.append((result.clients[0], float(weights)))
            return super().summarise(result, weights, broadcast)

    run([reply([0, 1, 2], GOOD)], hyper=Noted(), weighting=weighting)
    share = 1 if weighting.local else 60
    assert clients == [(k, pytest.approx(10 * (k + 1) / share)) for k in range(3)]


def spoilt_rule(change):
    @component
    class Spoilt(Aggregator):
        """Averages, and spoils what it found."""

        name = "spoilt"

        def fuse(self, posteriors, weights, prior):
            return change(Average().fuse(posteriors, weights, prior))

    return Spoilt()


SPOILT = {
    "not finite": (lambda q: q.map(lambda t: t * torch.nan), "mean is not finite"),
    "a client axis": (
        lambda q: q.map(lambda t: t[None]),
        r"mean is torch.float64 \[1, 6\], not torch.float64 \[6\]",
    ),
    "float32": (
        lambda q: q.map(torch.Tensor.float),
        r"mean is torch.float32 \[6\], not torch.float64",
    ),
    "a gradient": (lambda q: q.map(lambda t: t.requires_grad_()), "mean requires grad; detach it"),
    "a negative variance": (lambda q: Gaussian(q.mean, -q.variance), "variance is negative"),
    "another family": (lambda q: Point(q.mean), "it is Point, not Gaussian"),
}


@pytest.mark.parametrize(("change", "reason"), SPOILT.values(), ids=SPOILT)
def test_a_fused_posterior_that_is_invalid_ends_the_round_and_its_aggregator_is_named(
    change, reason
):
    before = sent()
    with pytest.raises(
        RoundError, match=f"^round 3: aggregator spoilt gave an invalid posterior: {reason}"
    ):
        run([reply([0], GOOD[[0]])], before, aggregator=spoilt_rule(change))
    assert equal(before.start, sent().start)


@component
class Confused(Fixed):
    """Sends a prior without meaning."""

    name = "confused"

    def update(self, broadcast, fused, total):
        return Broadcast(broadcast.round + 1, fused, fused.map(lambda t: -t), {})


def test_a_prior_that_is_invalid_is_the_hyper_updates_fault():
    with pytest.raises(RoundError, match="^round 3: hyper confused gave .*: variance is negative"):
        run([reply([0], GOOD[[0]])], hyper=Confused())


def failing(base, method):
    def fail(self, *_):
        return {}["nothing"]

    return component(type("Failing", (base,), {"name": "failing", method: fail}))()


@pytest.mark.parametrize(
    ("part", "method"),
    [
        *((Average, method) for method in ("encode", "merge", "decode", "report")),
        (Together, "fuse"),
        *((Given, "weigh"), (NotLocal, "weigh"), (Fixed, "update")),
    ],
)
def test_a_server_part_that_raises_is_named_with_its_file_and_line(part, method):
    wrong = failing(part, method)
    line = failing.__code__.co_firstlineno + 2
    with pytest.raises(RoundError) as caught:
        run([reply([0], GOOD[[0]])], **{wrong.kind: wrong})
    folder = Path(__file__).parent.name
    assert str(caught.value) == (
        f"round 3: {wrong.kind} failing failed: KeyError: 'nothing' at "
        f"{folder}/{Path(__file__).name}:{line}"
    )


def test_a_round_without_a_valid_result_is_passed_over_where_that_is_allowed():
    lost = [ClientError(client, "fit", "late") for client in range(4)]
    with pytest.raises(RoundError, match="0 of 4 clients"):
        run(lost)
    before = sent()
    done, _ = run(lost, before, min_clients=0)
    assert done.broadcast.round == before.round + 1
    assert done.broadcast.start is before.start
    assert done.broadcast.prior is before.prior
    assert (done.replied, len(done.dropped)) == ((), 4)
    assert math.isnan(done.loss)
