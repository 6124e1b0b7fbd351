"""The interface of local inferences: how a client's data turn a prior into a posterior."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from bflcore.inference.memory import Memory, client_posterior
from bflcore.lazy import lazy
from bflcore.options import Component
from bflcore.problem.label_prior import LABEL_COUNTS, label_counts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.messages import Broadcast, Cohort, LocalResult
    from bflcore.posteriors import Posterior
    from bflcore.problem import Problem
    from bflcore.problem.likelihoods import Predictive
else:
    torch = lazy("torch")

__all__ = ["Explorable", "LocalInference", "answers", "label_counts"]


class LocalInference(Component, abc.ABC):
    """Base of local inferences.

    `fit` handles a cohort of K clients at once, and returns what K cohorts of one client would, up
    to rounding.
    """

    kind: ClassVar[str] = "inference"
    family: ClassVar[str]  # name of the posterior family that `fit` returns
    # Tags that the other parts of a recipe must have: kind -> tag. Others are refused.
    needs: ClassVar[Mapping[str, str]] = MappingProxyType({})
    known_tags = MappingProxyType(
        {
            "exact-conjugate": "`fit` returns the exact posterior of linear regression with known "
            "noise, for a family without correlations if each sample depends on one parameter "
            "(checked)",
            "conserves-evidence": "the posterior is the first prior times the sites that clients "
            "keep, whatever replies are lost or refused and whenever the run is killed (checked)",
            "pools-samples": "`fit` reads the samples of all clients, which only a simulation can "
            "give it (declared)",
        }
    )

    @property
    def leaves_certain(self) -> bool:
        """Whether `fit` gives variance 0, certainty, to parameters that it did not infer."""
        return False

    def check(self, problem: Problem) -> None:
        """Raise `OptionError` for a problem that this inference cannot handle (default: none).

        Called once, before a run writes anything.
        """

    def check_parts(self, parts: Mapping[str, Component]) -> None:
        """Raise `IncompatibleError` for parts that do not work with these options (default: none).

        `parts` are the aggregator, the weighting and the hyperparameter update, by kind. Called
        when an experiment is resolved, after the families have been compared.
        """

    def survey(self, problem: Problem, cohort: Cohort) -> Mapping[str, Tensor]:
        """Return what the server must know of the clients' data before round 1, by name.

        Each tensor ``[K, ...]`` is summed over all clients, in float64 if it is real. The sums are
        in ``problem.survey`` wherever this inference is called later, and the server sees nothing
        else of the data. By default: ``examples`` ``[K]``, the number of training samples. An
        override keeps that entry, and must accept a cohort without samples, which shows the server
        the form of an answer.
        """
        return {"examples": torch.tensor(cohort.sizes, device=cohort.x.device)}

    @abc.abstractmethod
    def initial(self, problem: Problem) -> Posterior:
        """Return the posterior ``[P]`` over all parameters before any sample is trained on.

        ``problem.survey`` is empty if only the form of the posterior is asked for.
        """

    def prior(self, problem: Problem) -> Posterior:
        """Return the prior ``[P]`` of the first round (default: the initial posterior)."""
        return self.initial(problem)

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of one client before training, without a client axis.

        By default it holds the initial posterior over the personal parameters.
        """
        return Memory(personal=self.initial(problem).split(problem.layout)[1]).pack()

    @abc.abstractmethod
    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Infer each client's posterior ``[K, P]`` from its data, the start and the prior."""

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Return the memory ``[K, ...]`` with which the clients will predict (default: unchanged).

        Called before each evaluation. Clients of a `novel` cohort were held out of training and may
        adapt to their training data here.
        """
        return cohort.memory

    @abc.abstractmethod
    def predict(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Predictive:
        """Predict the targets of samples `x` ``[K, B, ...]``, row k by client k.

        Uses the server's posterior (``broadcast.start``), the clients' memories, and noise from
        ``cohort.streams("predict")``; the cohort's training data are not used.
        """

    def posterior(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> Posterior:
        """Return the posterior ``[K, P]`` with which each client predicts, for export.

        By default the client's own if it keeps one, else the server's joined with its personal
        one. An inference that predicts with other parameters overrides it.
        """
        return client_posterior(problem, broadcast, cohort)


@runtime_checkable
class Explorable(Protocol):
    """An inference for which the report also draws metrics along an axis, and a loss landscape."""

    def curves(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Mapping[str, Mapping[float, Predictive]]:
        """Predict `x` ``[K, B, ...]`` at values of a quantity: axis name -> value -> prediction.

        Each prediction is evaluated on the clients' test samples, and the report plots the metrics
        against the values.
        """

    def landmarks(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Return one or two networks ``[K, P]`` by label; the landscape is drawn through them."""


def answers(inference: LocalInference, problem: Problem, cohort: Cohort) -> dict[str, Tensor]:
    """Return what the one client of `cohort` answers to the survey ``[...]``, by name.

    The inference's answers, and the label counts ``[C]`` for a likelihood that needs them.
    """
    found = dict(inference.survey(problem, cohort))
    if problem.likelihood.counts_labels:
        found[LABEL_COUNTS] = problem.label_counts(cohort)
    return {name: tensor[0] for name, tensor in found.items()}
