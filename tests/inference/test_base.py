"""The defaults of a local inference."""

import attrs
import pytest

from bflcore import LocalInference, Point, component
from bflcore.inference.base import Explorable
from bflcore.testing.problems import assert_same, cohort, first_broadcast, problem


@component
class Still(LocalInference):
    """Learn nothing."""

    kind = "inference"
    name = "still"
    family = "point"

    def initial(self, problem):
        return Point(problem.initial)

    def fit(self, problem, broadcast, cohort):
        raise NotImplementedError

    def predict(self, problem, broadcast, cohort, x):
        raise NotImplementedError


def test_the_first_prior_is_the_initial_posterior():
    of = problem()
    assert_same(Still().prior(of), Still().initial(of), "prior", 0.0)


def test_a_new_client_remembers_its_personal_parameters_as_initialised():
    of = problem(sharing="body")
    remembered = Still().initial_memory(of)
    assert_same(
        remembered, Still().initial(of).split(of.layout)[1].pack("personal."), "memory", 0.0
    )
    assert Still().initial_memory(problem()).get("personal.mean", of.initial[:0]).numel() == 0


def test_every_problem_is_accepted_and_personalising_changes_nothing():
    of, inference = problem(sharing="body", novel=(2,)), Still()
    inference.check(of)
    members = cohort(of, inference, [2])
    assert members.novel
    after = inference.personalise(of, first_broadcast(inference, of), members)
    assert after is members.memory


def test_only_an_inference_with_curves_and_landmarks_is_explorable():
    class Curious(Still):
        def curves(self, problem, broadcast, cohort, x):
            return {}

        def landmarks(self, problem, broadcast, cohort):
            return {}

    assert isinstance(attrs.define(Curious)(), Explorable)
    assert not isinstance(Still(), Explorable)


def test_an_inference_without_fit_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        LocalInference()
