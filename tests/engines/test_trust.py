"""The trust region: one client of several cannot decide, and honest ones are left alone."""

from __future__ import annotations

import json
import statistics

import attrs
import pytest
import torch

from bflcore import (
    Average,
    Broadcast,
    Continual,
    Equal,
    Examples,
    Fixed,
    Gaussian,
    Map,
    ProductOfChanges,
    component,
)
from bflcore.engines.local import Local
from bflcore.engines.trust import Standing, TrustRegion, magnitudes
from bflcore.errors import ClientError
from bflcore.messages import REPORTED
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.conjugate import ExactSites, regression
from bflcore.testing.problems import Replies, gaussian, reply

SIZE = 6
SENT = Broadcast(0, gaussian(SIZE, seed=50), gaussian(SIZE, seed=51))


def honest(client):
    moved = Gaussian(SENT.start.mean + 0.1 * gaussian(SIZE, seed=client).mean, SENT.start.variance)
    sums = {"moment": torch.full((1, 2), 1.0 + client, dtype=torch.float64)}
    return reply([client], moved.map(lambda t: t[None]), examples=[20 + client], statistics=sums)


def lying(client, **fields):
    good = honest(client)
    posterior = attrs.evolve(good.posterior, **fields)
    return attrs.evolve(good, posterior=posterior)


def full(value):
    return torch.full((1, SIZE), value, dtype=torch.float64)


LIES = {
    "the change of its mean is": lying(0, mean=full(7000.0)),
    "the mean precision of its variance is": lying(0, variance=full(1e-9)),
    "the mean of its variance is": lying(0, variance=full(1e9)),
    "examples is 1e+15": attrs.evolve(honest(0), examples=torch.tensor([10**15])),
    "its statistic moment is": attrs.evolve(
        honest(0), statistics={"moment": torch.full((1, 2), 1e6, dtype=torch.float64)}
    ),
}


def admitted(results, factor=30.0):
    return list(TrustRegion(SENT, factor).admit(results))


@pytest.mark.parametrize("reason", LIES)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_whoever_exceeds_the_median_by_far_is_refused_by_name(reason, place):
    others = [honest(client) for client in (1, 2, 3, 4)]
    found = admitted([*others[:place], LIES[reason], *others[place:]])
    assert isinstance(found[place], ClientError)
    assert found[place].client == 0
    assert reason in found[place].reason
    assert "times is trusted (--trust)" in found[place].reason
    del found[place]
    assert found == others


@pytest.mark.parametrize("reason", LIES)
def test_a_factor_of_zero_trusts_everybody(reason):
    results = [LIES[reason], *map(honest, (1, 2, 3))]
    assert admitted(results, 0) == results


def test_the_honest_clients_result_is_that_of_a_round_without_the_liar():
    recipe = Recipe(Map(), Average(), Examples(), Fixed())
    others = [attrs.evolve(honest(client), statistics={}) for client in (1, 2, 3)]
    liar = attrs.evolve(LIES["the mean precision of its variance is"], statistics={})
    alone = run_round(recipe, Replies(*others), SENT, (1, 2, 3), trust=30.0)
    both = run_round(recipe, Replies(liar, *others), SENT, (0, 1, 2, 3), trust=30.0)
    assert [failure.client for failure in both.dropped] == [0]
    for name, tensor in alone.broadcast.start.pack().items():
        assert both.broadcast.start.pack()[name].equal(tensor)


def test_two_clients_cannot_be_told_apart():
    results = [LIES["the change of its mean is"], honest(1)]
    assert admitted(results) == results


def test_later_blocks_are_compared_with_the_earlier_ones():
    region = TrustRegion(SENT, 30.0)
    assert len(list(region.admit(map(honest, (1, 2, 3, 4))))) == 4
    (found,) = region.admit([LIES["the change of its mean is"]])  # a block of one client
    assert isinstance(found, ClientError)


@pytest.mark.parametrize("factor", [0.0, 30.0])
def test_the_form_of_statistics_is_that_of_most_clients_whoever_comes_first(factor):
    for wrong in ({}, {"moment": torch.zeros(1, 3)}, {"other": torch.zeros(1, 2)}):
        liar = attrs.evolve(honest(0), statistics=wrong)
        first, *others = admitted([liar, *map(honest, (1, 2))], factor)
        assert isinstance(first, ClientError)
        assert "as most clients'" in first.reason
        assert not any(isinstance(other, ClientError) for other in others)


def test_magnitudes_are_those_of_numpy():
    result, found = honest(3), magnitudes(honest(3), SENT)
    moved = (result.posterior.mean - SENT.start.mean).abs().numpy()
    assert found["the change of its mean"] == pytest.approx((moved**2).mean() ** 0.5)
    assert found["the largest change of its mean"] == pytest.approx(moved.max())
    precision = 1 / result.posterior.variance.numpy()
    assert found["the mean precision of its variance"] == pytest.approx(precision.mean())
    assert found["the largest precision of its variance"] == pytest.approx(precision.max())
    assert found["examples"] == 23


def test_certain_coordinates_have_no_precision():
    certain = lying(3, variance=torch.tensor([[0.0, 0.0, 0.0, 0.5, 0.5, 0.5]]).double())
    found = magnitudes(certain, SENT)
    assert found["the largest precision of its variance"] == 2
    assert found["the mean of its variance"] == 0.5
    assert "the mean of its variance" not in magnitudes(lying(3, variance=full(0.0)), SENT)


def test_the_bound_on_one_clients_influence_on_an_average():
    """Whatever one of K equal clients says, the mean moves by at most factor x median / K."""
    factor, clients = 10.0, 10
    recipe = Recipe(Map(), Average(), Equal(), Fixed())
    others = [attrs.evolve(honest(client), statistics={}) for client in range(1, clients)]
    usual = statistics.median(magnitudes(r, SENT)["the change of its mean"] for r in others)
    without = run_round(recipe, Replies(*others), SENT, range(1, clients), trust=factor)
    reached = 0.0
    for scale in (0.1, 1.0, 3.0, 9.0, 30.0, 1e3, 1e6):
        mean = SENT.start.mean + scale * usual
        liar = attrs.evolve(lying(0, mean=mean[None]), statistics={})
        fused = run_round(recipe, Replies(liar, *others), SENT, range(clients), trust=factor)
        shift = fused.broadcast.start.mean - without.broadcast.start.mean
        reached = max(reached, float(shift.square().mean().sqrt()))
    assert 0 < reached <= (factor + 1) * usual * 1.2 / clients


def test_one_client_with_most_of_the_weight_is_named_by_the_round():
    recipe = Recipe(Map(), Average(), Examples(), Fixed())
    results = [attrs.evolve(honest(client), statistics={}) for client in range(3)]
    results[1] = attrs.evolve(results[1], examples=torch.tensor([900]))
    done = run_round(recipe, Replies(*results), SENT, range(3))
    assert done.heaviest == (1, pytest.approx(900 / (900 + 20 + 22)))


def test_single_coordinates_and_statistics_may_vary_more():
    mean = SENT.start.mean.clone()
    usual = statistics.median(
        magnitudes(honest(c), SENT)["the largest change of its mean"] for c in (1, 2, 3, 4)
    )
    for times, refused in ((200.0, False), (600.0, True)):
        wide = Gaussian(mean.repeat(1000), torch.ones(6000).double())
        sent = Broadcast(0, wide, wide)
        others = [honest(c).posterior.map(lambda t: t.repeat(1, 1000)) for c in (1, 2, 3, 4)]
        one = wide.map(lambda t: t[None].clone())
        one.mean[0, 7] += times * usual  # one coordinate of 6,000
        results = [reply([0], one), *(reply([c + 1], q) for c, q in enumerate(others))]
        first = next(iter(TrustRegion(sent, 30.0).admit(results)))
        assert isinstance(first, ClientError) == refused


def sent_by(directions, examples=20):
    """Return one result per direction ``[P]`` in which a client's mean moves."""
    start = Gaussian(torch.zeros(200).double(), torch.ones(200).double())
    found = []
    for client, direction in enumerate(directions):
        moved = Gaussian(start.mean + direction, start.variance)
        found.append(reply([client], moved.map(lambda t: t[None]), examples=[examples]))
    return Broadcast(0, start, start), found


def refused(directions, examples=20, before=None):
    broadcast, results = sent_by(directions, examples)
    region = TrustRegion(broadcast, 30.0, before)
    found = list(region.admit(results))
    return {f.client: f.reason for f in found if isinstance(f, ClientError)}, region.standing


def towards(clients, common, seed=0):
    """Return directions ``[K, P]`` with a part in common and a part of their own."""
    noise = torch.Generator().manual_seed(seed)
    own = torch.randn(clients, 200, generator=noise, dtype=torch.float64)
    return common * torch.ones(200).double() + own


@pytest.mark.parametrize("times", [1.0, 4.0])
def test_a_client_that_negates_what_it_learnt_is_refused(times):
    directions = towards(10, 1.5)
    assert refused(directions)[0] == {}
    directions[3] *= -times
    found, _ = refused(directions)
    assert list(found) == [3]
    assert "points against a third of the round's clients" in found[3]


def test_groups_of_clients_that_move_apart_are_left_alone():
    directions = towards(10, 1.5)
    directions[5:] -= 3.0  # two halves, each against the other
    assert refused(directions)[0] == {}


def test_one_client_with_data_of_its_own_is_left_alone():
    directions = towards(10, 1.5)
    directions[4] = towards(1, 0.0, seed=1)[0]  # at right angles to everybody
    assert refused(directions)[0] == {}


def test_of_seven_clients_no_direction_is_known():
    directions = towards(7, 1.5)
    directions[3] *= -1
    assert refused(directions)[0] == {}


def test_where_clients_agree_nobody_may_move_five_times_as_far():
    directions = towards(10, 1.5)
    directions[2] *= 4.0
    assert refused(directions)[0] == {}
    directions[2] *= 1.5
    found, _ = refused(directions)
    assert "5 times is trusted" in found[2]
    assert refused(towards(10, 0.0) * torch.tensor([6.0] + [1.0] * 9)[:, None])[0] == {}


def test_a_client_with_more_samples_may_move_further():
    broadcast, results = sent_by(towards(10, 1.5) * torch.tensor([9.0] + [1.0] * 9)[:, None])
    assert isinstance(next(iter(TrustRegion(broadcast, 30.0).admit(results))), ClientError)
    results[0] = attrs.evolve(results[0], examples=torch.tensor([100]))
    assert not isinstance(next(iter(TrustRegion(broadcast, 30.0).admit(results))), ClientError)


def test_a_client_that_claims_more_than_it_reported_is_refused_by_name():
    before = Standing({0: 20, 1: 19})
    found, after = refused(towards(3, 1.5), before=before)
    assert found == {1: "examples is 20, but it reported 19 before; allowed: at most that"}
    assert after.reported == {0: 20, 1: 19, 2: 20}  # client 2 was not surveyed
    assert refused(towards(3, 1.5), examples=21, before=after)[0].keys() == {0, 1, 2}


def test_whoever_was_refused_stays_out_until_it_was_sound_four_times_as_often():
    honest_ones, lies = towards(10, 1.5), towards(10, 1.5)
    lies[3] *= -1
    standing = Standing()
    for _ in range(1):
        _, standing = refused(lies, before=standing)
    assert standing.suspected == {3: 4}
    seen = []
    for _ in range(5):
        found, standing = refused(honest_ones, before=standing)
        seen.append(found)
    assert [list(found) for found in seen] == [[3], [3], [3], [3], []]
    assert "4 more sound results" in seen[0][3]
    assert standing.suspected == {}


def settled_then(inference, asked, trust=30.0):
    """Return the round in which clients are `asked` after 0 to 5 of 9 have settled."""
    of = regression((30,) * 9, 4, 20.0)
    recipe = Recipe(inference, ProductOfChanges(), Equal(), Continual())
    broadcast, standing = begin(recipe, of), Standing()
    with Local(workers=1).open(of, inference, bins=1) as session:
        for number in range(61):
            clients = (0, 1, 2, 3, 4, 5) if number < 60 else asked
            done = run_round(recipe, session, broadcast, clients, trust=trust, standing=standing)
            assert number == 60 or not done.dropped
            broadcast, standing = done.broadcast, done.standing
    return done


def test_a_site_that_comes_when_others_have_settled_is_compared_with_first_replies():
    done = settled_then(ExactSites(damping=0.5), (0, 1, 2, 3, 7))
    assert done.dropped == ()
    assert done.standing.replied == frozenset({0, 1, 2, 3, 4, 5, 7})


def test_without_sites_such_a_client_is_refused():
    @component
    class Undeclared(ExactSites):
        """Keeps sites, and does not say so."""

        name, tags = "undeclared", frozenset()

    (refused,) = settled_then(Undeclared(damping=0.5), (0, 1, 2, 3, 7)).dropped
    assert refused.client == 7
    assert "times the median" in refused.reason


def test_a_first_reply_far_from_other_first_replies_is_refused():
    first = [honest(client) for client in (1, 2, 3, 4)]
    region = TrustRegion(SENT, 30.0, sites=True)
    assert not any(isinstance(one, ClientError) for one in region.admit(first))
    still = [reply([c], SENT.start.map(lambda t: t[None]), examples=[20 + c]) for c in (1, 2, 3, 4)]
    sums = honest(1).statistics
    still = [attrs.evolve(one, statistics=sums) for one in still]
    later = TrustRegion(SENT, 30.0, region.standing, sites=True)
    liar, late = attrs.evolve(LIES["the change of its mean is"]), honest(5)
    found = list(later.admit([*still, liar, late]))
    assert [one.client for one in found if isinstance(one, ClientError)] == [0]
    assert later.standing.replied == frozenset({1, 2, 3, 4, 5})


def test_a_standing_survives_json():
    standing = Standing({3: 20}, {1: 2}, frozenset({3, 1}), {"the change of its mean": (0.5, 2.0)})
    assert Standing.unpack(json.loads(json.dumps(standing.pack()))) == standing
    assert Standing.unpack({}) == Standing()


def test_what_is_only_reported_to_the_user_is_no_reason_to_refuse():
    """A client may correct every parameter of its site in a round where the others correct none."""
    name = REPORTED + "corrected"
    results = [
        attrs.evolve(
            honest(client),
            statistics={name: torch.tensor([80_000.0 if client == 3 else 0.5 * client])},
        )
        for client in range(6)
    ]
    found = list(TrustRegion(SENT, 30.0).admit(results))
    assert not [one for one in found if isinstance(one, ClientError)]
    learnt = [attrs.evolve(r, statistics={"moment": r.statistics[name]}) for r in results]
    refused = [r for r in TrustRegion(SENT, 30.0).admit(learnt) if isinstance(r, ClientError)]
    assert [one.client for one in refused] == [3]
