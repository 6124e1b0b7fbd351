"""What passes between the server and its clients."""

import attrs
import pytest
import torch

from bflcore import Broadcast, Cohort, Gaussian
from bflcore.testing.problems import assert_same, cohort, gaussian, normal, problem, reply


def test_a_broadcast_is_unpacked_to_what_was_packed():
    sent = Broadcast(3, gaussian(4), gaussian(4, seed=5), {"step": torch.tensor(2)})
    again = Broadcast.unpack(3, sent.pack(), Gaussian)
    assert_same(again, sent, "unpacked", 0.0)


def test_what_the_prior_shares_with_the_start_is_packed_once():
    start = gaussian(4)
    half = Gaussian(start.mean, start.variance + 1)
    assert set(Broadcast(0, start, start).pack()) == {"start.mean", "start.variance"}
    sent = Broadcast(0, start, half)
    assert set(sent.pack()) == {"start.mean", "start.variance", "prior.variance"}
    assert_same(Broadcast.unpack(0, sent.pack(), Gaussian), sent, "unpacked", 0.0)


def test_a_prior_that_clients_can_compute_is_not_sent():
    start, first = gaussian(4), gaussian(4, seed=5)
    known = Broadcast(7, start, first, {"survey.examples": torch.tensor(30)}, first)
    sent = known.sent()
    assert sum(tensor.nbytes for tensor in sent.values()) == start.mean.nbytes * 2 + 8
    asked = []
    found = Broadcast.unpack(7, sent, Gaussian, lambda survey: asked.append(survey) or first)
    assert_same(found.prior, first, "the prior", 0.0)
    assert asked == [{"examples": torch.tensor(30)}]
    with pytest.raises(ValueError, match="the prior is missing"):
        Broadcast.unpack(7, sent, Gaussian)


def test_a_prior_that_moved_or_equals_the_start_is_sent_as_ever():
    start, first = gaussian(4), gaussian(4, seed=5)
    for prior in (start, Gaussian(first.mean, first.variance * 2)):
        broadcast = Broadcast(7, start, prior, {}, first)
        assert broadcast.sent().keys() == broadcast.pack().keys()


def test_what_never_changes_stays_when_an_update_drops_it():
    first = gaussian(4)
    before = Broadcast(
        0, first, first, {"survey.n": torch.tensor(3), "state": torch.tensor(1)}, first
    )
    after = before.followed_by(Broadcast(1, first, first, {"state": torch.tensor(2)}))
    assert after.survey == {"n": torch.tensor(3)}
    assert (after.round, int(after.hyper["state"]), after.first_prior) == (1, 2, first)


def test_a_cohort_in_which_sizes_rise_is_refused():
    x = torch.zeros(2, 3, 1)
    with pytest.raises(ValueError, match="sizes must fall"):
        Cohort((0, 1), x, x[..., 0], (2, 3), {}, 0, 0)


def test_a_clients_noise_does_not_depend_on_its_company():
    from bflcore import Map

    of = problem()
    together = cohort(of, Map()).streams("noise")
    alone = cohort(of, Map(), [1]).streams("noise")
    assert torch.equal(torch.rand(3, generator=together[1]), torch.rand(3, generator=alone[0]))


def test_selected_clients_keep_what_is_theirs():
    results = reply([4, 7, 9], gaussian(3, 2), statistics={"s": normal(3, 5)})
    results = attrs.evolve(results, memory={"m": normal(3, 1)})
    picked = results.select([2, 0])
    assert picked.clients == (9, 4)
    assert picked.examples.tolist() == [100, 50]
    for name in ("posterior", "statistics", "memory"):
        theirs, all_of_them = getattr(picked, name), getattr(results, name)
        if name == "posterior":
            assert torch.equal(theirs.mean, all_of_them.mean[[2, 0]])
        else:
            assert all(torch.equal(theirs[k], t[[2, 0]]) for k, t in all_of_them.items())


def test_a_calibration_belongs_to_the_round_after_which_it_was_made():
    sums = {"calibration.ood.examples": torch.tensor(3), "survey.examples": torch.tensor(9)}
    before = Broadcast(3, gaussian(2), gaussian(2), sums)
    after = before.followed_by(Broadcast(4, gaussian(2), gaussian(2), dict(before.hyper)))
    assert list(before.calibration) == ["ood.examples"]
    assert after.calibration == {}
    assert after.survey.keys() == {"examples"}
