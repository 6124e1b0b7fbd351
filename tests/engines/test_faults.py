"""Simulated clients that drop out or send garbage."""

from __future__ import annotations

import attrs

from bflcore import (
    Average,
    Equal,
    Fixed,
    Map,
    Variational,
)
from bflcore.engines.faults import GARBAGE, simulate_faults
from bflcore.engines.local import Local
from bflcore.rounds import Recipe, begin, run_round
from bflcore.testing.problems import problem


def faulty_round(drop_out, corrupt, number=0, chunk=1, inference=None):
    of, inference = problem(sizes=(3,) * 40), inference or Variational(local_epochs=1)
    recipe = Recipe(inference, Average(), Equal(), Fixed())
    with Local(workers=1, chunk=chunk).open(of, inference, 10) as session:
        broadcast = attrs.evolve(begin(recipe, of), round=number)
        return run_round(
            recipe, simulate_faults(session, 5, drop_out, corrupt), broadcast, of.clients, 1
        )


def test_simulated_faults_are_drawn_by_the_seed_whoever_trains_together():
    one, all_together = faulty_round(0.3, 0.3), faulty_round(0.3, 0.3, chunk=40)
    assert [str(e) for e in one.dropped] == [str(e) for e in all_together.dropped]
    assert [e.client for e in one.dropped] == sorted(e.client for e in one.dropped)
    assert [str(e) for e in one.dropped] != [str(e) for e in faulty_round(0.3, 0.3, 1).dropped]
    # Of 40 clients 40 * (0.3 + 0.7 * 0.3) = 20.4 fail; five standard deviations are 15.8.
    assert 5 <= len(one.dropped) <= 36


def test_every_kind_of_garbage_occurs_and_is_refused():
    reasons = " ".join(error.reason for error in faulty_round(0, 0.9).dropped)
    for part in ("is not finite", "larger than", "is negative", "is torch.float64 ["):
        assert part in reasons
    points = faulty_round(0, 0.9, inference=Map(local_epochs=1))
    assert len(GARBAGE) == 4
    assert len(points.dropped) > 25


def test_no_faults_are_simulated_unless_asked_for():
    session = object()
    assert simulate_faults(session, 0, 0, 0) is session
