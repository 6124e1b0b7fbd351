"""What clients keep: the law of memories, and the two halves of a posterior."""

from __future__ import annotations

import attrs
import pytest
import torch

from bflcore import Gaussian, Map, Point, Variational
from bflcore.inference.memory import (
    Memory,
    OwnPosterior,
    client_posterior,
    join_personal,
    keep_own,
    local_result,
)
from bflcore.messages import within
from bflcore.testing.problems import cohort, first_broadcast, gaussian, normal, problem

each_sharing = pytest.mark.parametrize("sharing", ["all", "body", "head", "none"])


@attrs.frozen(eq=False, kw_only=True)
class Velocities(OwnPosterior):
    """A memory with fields of every kind."""

    velocity: torch.Tensor | None = None


FULL = Velocities(
    personal=gaussian(3, 2),
    own=gaussian(3, 5, seed=2),
    started=torch.tensor([1.0, 0.0, 1.0]),
    velocity=normal(3, 5, seed=4),
)
MEMORIES = {
    "empty": Velocities(),
    "personal": Memory(personal=gaussian(3, 2)),
    "own": OwnPosterior.empty(gaussian(5)),
    "all": FULL,
    "none started": attrs.evolve(FULL, started=None),
    "no velocity": attrs.evolve(FULL, velocity=None),
}


def equal(left, right):
    """Whether two memories of one class hold the same tensors in the same fields."""
    pairs = zip(
        attrs.asdict(left, recurse=False).items(),
        attrs.asdict(right, recurse=False).values(),
        strict=True,
    )
    for (name, one), other in pairs:
        if one is None or other is None:
            assert one is other, name
        elif isinstance(one, torch.Tensor):
            assert torch.equal(one, other), name
        else:
            assert torch.equal(one.mean, other.mean), name
            assert torch.equal(one.variance, other.variance), name
    return type(left) is type(right)


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_a_memory_is_unpacked_to_what_was_packed(memory):
    assert equal(type(memory).unpack(memory.pack(), Gaussian), memory)


def test_fields_without_a_value_are_left_out():
    assert Velocities().pack() == {}
    assert set(attrs.evolve(FULL, own=None).pack()) == {
        "personal.mean",
        "personal.variance",
        "started",
        "velocity",
    }


def test_a_posterior_is_packed_under_the_name_of_its_field():
    found = within(FULL.pack(), "own.")
    assert torch.equal(found["mean"], FULL.own.mean)
    assert torch.equal(found["variance"], FULL.own.variance)


def test_a_memory_reads_its_own_fields_among_those_of_others():
    tensors = FULL.pack() | {"control": normal(3)}
    assert equal(Memory.unpack(tensors, Gaussian), Memory(personal=FULL.personal))


def test_the_initial_memory_is_the_personal_part_of_the_initial_posterior():
    of, inference = problem(sharing="body"), Variational()
    expected = inference.initial(of).split(of.layout)[1]
    assert equal(Memory.unpack(inference.initial_memory(of), Gaussian), Memory(personal=expected))


@each_sharing
def test_a_clients_parameters_are_the_shared_ones_beside_its_personal_ones(sharing):
    of = problem(sharing=sharing)
    shared, personal = gaussian(3, of.layout.total).split(of.layout)
    members = attrs.evolve(cohort(of, Variational()), memory=Memory(personal=personal).pack())
    joined = join_personal(of, shared[0], members)
    for client in range(3):
        expected = shared[0].join(personal[client], of.layout)
        assert torch.equal(joined.mean[client], expected.mean)
        assert torch.equal(joined.variance[client], expected.variance)


def test_a_memory_without_the_personal_posterior_is_refused():
    of = problem(sharing="body")
    members = attrs.evolve(cohort(of, Map()), memory={})
    with pytest.raises(KeyError, match="no posterior over the personal parameters"):
        join_personal(of, first_broadcast(Map(), of).start, members)


def test_a_client_predicts_with_its_own_posterior_once_it_has_one():
    of, inference = problem(), Map()
    sent, members = first_broadcast(inference, of), cohort(of, inference)
    own = Point(normal(3, of.layout.total, seed=9))
    started = torch.tensor([1.0, 0.0, 1.0])
    kept = keep_own(members.memory, own) | {"started": started}
    found = client_posterior(of, sent, attrs.evolve(members, memory=kept)).mean
    assert torch.equal(found[[0, 2]], own.mean[[0, 2]])
    assert torch.equal(found[1], sent.start.mean)


def test_keeping_an_own_posterior_leaves_the_rest_of_the_memory():
    own = gaussian(3, 5)
    kept = keep_own(FULL.pack(), own)
    found = Velocities.unpack(kept, Gaussian)
    assert equal(found, attrs.evolve(FULL, own=own, started=torch.ones(3, dtype=torch.float64)))


@each_sharing
def test_a_result_divides_what_is_shared_from_what_is_kept(sharing):
    of = problem(sharing=sharing)
    members = cohort(of, Map())
    members = attrs.evolve(members, memory={**members.memory, "momentum": normal(3, 4)})
    weights = normal(3, of.layout.total)
    statistics = {"noise": normal(3)}
    result = local_result(of, members, Point(weights), normal(3), statistics)
    assert result.clients == members.clients
    assert result.examples.tolist() == [7, 5, 2]
    assert torch.equal(result.statistics["noise"], statistics["noise"])
    assert torch.equal(result.memory["momentum"], members.memory["momentum"])
    back = of.layout.join(result.posterior.mean, result.memory["personal.mean"])
    assert torch.equal(back, weights)
    assert result.posterior.mean.shape == (3, of.layout.shared_total)


def test_a_result_replaces_the_fields_of_the_memory_that_it_is_given():
    of = problem()
    members = attrs.evolve(cohort(of, Variational()), memory=FULL.pack())
    new = Velocities(velocity=normal(3, 5, seed=7))
    fitted = gaussian(3, of.layout.total)
    result = local_result(of, members, fitted, normal(3), memory=new)
    found = Velocities.unpack(result.memory, Gaussian)
    assert torch.equal(found.velocity, new.velocity)
    assert torch.equal(found.own.mean, FULL.own.mean)
