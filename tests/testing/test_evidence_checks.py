"""The law of evidence holds through any history, and notices those that count data again."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bflcore import Continual, ProductOfChanges, Variational, component
from bflcore.inference.sites import SiteMemory, exact_natural
from bflcore.rounds import Recipe
from bflcore.testing.conjugate import ExactSites, pooled, regression
from bflcore.testing.evidence_checks import (
    FATES,
    Event,
    assert_conserved,
    evidence_is_conserved,
    live_through,
)
from bflcore.weighting import Equal

CLIENTS = 4
EVERYBODY = Event(("replies",) * CLIENTS)
AGAIN = [EVERYBODY, EVERYBODY]
histories = st.lists(
    st.builds(Event, st.tuples(*[st.sampled_from(FATES)] * CLIENTS), st.booleans()), max_size=8
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=25, deadline=None)
@given(history=histories, damping=st.sampled_from([1.0, 0.4]))
def test_evidence_is_conserved_through_any_history(dtype, history, damping):
    assert_conserved(ExactSites(damping=damping), regression(dtype=dtype), history)


@settings(max_examples=15, deadline=None)
@given(history=histories)
def test_a_history_that_reaches_everybody_ends_with_the_exact_precisions(history):
    of, inference = regression(), ExactSites()
    recipe = Recipe(inference, ProductOfChanges(), Equal(), Continual())
    *_, (broadcast, _) = live_through(recipe, of, [*history, EVERYBODY])
    due = pooled(of, inference.initial(of))[1].diagonal()
    torch.testing.assert_close(broadcast.start.variance.reciprocal(), due, rtol=1e-9, atol=0)


def keeping(**changes):
    """Return an inference whose bookkeeping is wrong: what it keeps is changed after the fit."""

    class Wrong(ExactSites):
        name = "wrong"

        def fit(self, problem, broadcast, cohort):
            result = ExactSites.fit(self, problem, broadcast, cohort)
            site = SiteMemory.unpack(result.memory, type(result.posterior)).site
            for name, change in changes.items():
                site[name] = change(site[name], result)
            return attrs.evolve(result, memory={**result.memory, **SiteMemory(site=site).pack()})

    return component(Wrong)()


WRONG = {
    "a client that forgets its site": keeping(precision=lambda t, _: 0 * t),
    "a client that keeps half of what it sends": keeping(shift=lambda t, _: t / 2),
    "a client that keeps its posterior": keeping(
        precision=lambda t, result: exact_natural(result.posterior)["precision"]
    ),
}


@pytest.mark.parametrize("inference", WRONG.values(), ids=WRONG.keys())
def test_wrong_books_are_noticed(inference):
    with pytest.raises(AssertionError, match="after . rounds"):
        assert_conserved(inference, regression(), AGAIN)


def test_a_posterior_that_is_the_next_prior_without_sites_is_noticed():
    @component
    class Forgetful(Variational):
        """Continual learning, as if each round's data were new."""

        name = "forgetful"
        tags = frozenset({"conserves-evidence"})

    with pytest.raises(AssertionError, match="the prior's and the clients' sites' add up to"):
        evidence_is_conserved(Forgetful)


KEPT = {}


@component
class Unrefusing(ExactSites):
    """Stores its new site although its reply was lost, as a client does that is not told."""

    name = "unrefusing"

    def fit(self, problem, broadcast, cohort):
        known = {n: torch.stack([KEPT.get((c, n), t[r]) for r, c in enumerate(cohort.clients)])
                 for n, t in cohort.memory.items()}  # fmt: skip
        result = super().fit(problem, broadcast, attrs.evolve(cohort, memory=known))
        for name, tensor in result.memory.items():
            KEPT.update({(c, name): tensor[r] for r, c in enumerate(cohort.clients)})
        return result


def test_a_site_that_outlives_a_lost_reply_is_noticed():
    lost = Event(("lost", "replies", "replies", "replies"))
    with pytest.raises(AssertionError, match="after . rounds"):
        assert_conserved(Unrefusing(), regression(), [lost, EVERYBODY])
