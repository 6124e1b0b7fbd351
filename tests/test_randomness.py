"""Streams: every draw has an owner, and the global generators have none of them."""

from __future__ import annotations

import random
from contextlib import contextmanager

import attrs
import numpy as np
import pytest
import torch

from bflcore import Map, Variational
from bflcore.randomness import SERVER, numpy_stream, seeded_globally, stream
from bflcore.testing.problems import cohort, convolutional, first_broadcast, problem

OWNER = {"seed": 3, "round": 5, "client": 7, "purpose": "noise"}
OTHERS = [
    {**OWNER, "seed": 4},
    {**OWNER, "round": 6},
    {**OWNER, "client": 8},
    {**OWNER, "client": SERVER},
    {**OWNER, "purpose": "batches"},
    {**OWNER, "round": 7, "client": 5},  # the round and the client exchanged
    {**OWNER, "seed": 2**40},
]


def drawn(owner):
    return torch.randn(8, generator=stream(**owner))


def drawn_by_numpy(owner):
    return numpy_stream(**owner).standard_normal(8)


@pytest.mark.parametrize("draw", [drawn, drawn_by_numpy])
def test_the_same_owner_draws_the_same(draw):
    assert np.array_equal(draw(OWNER), draw(OWNER))


@pytest.mark.parametrize("draw", [drawn, drawn_by_numpy])
@pytest.mark.parametrize("other", OTHERS)
def test_another_owner_draws_differently(draw, other):
    assert not np.isin(draw(OWNER), draw(other)).any()


def test_streams_of_many_owners_never_start_alike():
    owners = [(s, r, c, p) for s in range(5) for r in range(5) for c in range(-1, 9) for p in "ab"]
    assert len({stream(*owner).initial_seed() for owner in owners}) == len(owners)


def test_draws_are_standard_normal_whoever_owns_them():
    draws = np.concatenate([drawn({**OWNER, "client": client}) for client in range(500)])
    assert abs(draws.mean()) < 5 / np.sqrt(draws.size)
    assert abs(draws.var() - 1) < 5 * np.sqrt(2 / draws.size)


@contextmanager
def untouched():
    """Fail if a global generator moves inside the block."""
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    yield
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])
    assert before[2] == after[2]


def test_drawing_from_a_stream_leaves_the_global_generators_alone():
    with untouched():
        drawn(OWNER)
        drawn_by_numpy(OWNER)


def test_seeding_globally_is_undone_at_the_end():
    with untouched(), seeded_globally(0, "network"):
        torch.randn(100)


def test_seeding_globally_is_undone_after_an_error():
    def fail():
        with seeded_globally(0, "network"):
            torch.randn(100)
            raise ValueError("inside")

    with untouched(), pytest.raises(ValueError, match="inside"):
        fail()


def test_draws_inside_the_block_follow_the_seed_and_the_purpose_alone():
    def inside(seed, purpose):
        torch.randn(3)  # where the global generator stood does not matter
        with seeded_globally(seed, purpose):
            return torch.randn(8)

    with torch.random.fork_rng(devices=[]):
        assert torch.equal(inside(1, "network"), inside(1, "network"))
        assert not torch.equal(inside(1, "network"), inside(2, "network"))
        assert not torch.equal(inside(1, "network"), inside(1, "another"))


@pytest.mark.parametrize(
    "inference",
    [
        Map(local_epochs=2, batch_size=3),
        *(
            Variational(local_epochs=2, batch_size=3, draws=2, estimator=name)
            for name in ("reparameterisation", "local-reparameterisation", "flipout")
        ),
    ],
)
def test_fitting_and_predicting_leave_the_global_generators_alone(inference):
    of = problem(convolutional(), shape=(2, 4, 4), head="4", sharing="body", novel=(2,))
    members = cohort(of, inference)
    with untouched():
        broadcast = first_broadcast(inference, of)
        memory = inference.fit(of, broadcast, members).memory
        novel = attrs.evolve(members, memory=memory, novel=True)
        memory = inference.personalise(of, broadcast, novel)
        inference.predict(of, broadcast, attrs.evolve(novel, memory=memory), members.x)


def test_streams_of_a_cohort_belong_to_its_clients_whatever_their_rows():
    of = problem()
    members = cohort(of, Map(), [0, 2], round=4)
    for client, generator in zip(members.clients, members.streams("noise"), strict=True):
        expected = stream(of.seed, 4, client, "noise")
        assert generator.initial_seed() == expected.initial_seed()


def test_a_stream_keeps_its_draws_from_release_to_release():
    # A run that was stopped under one release goes on under the next: these may never change.
    assert stream(1, 2, 3, "noise").initial_seed() == 2411348092871983974
    assert numpy_stream(1, 2, 3, "noise").integers(1000) == 144
