"""The seam of local inference: how a client's data turns a prior into a posterior."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from bflcore.inference.memory import Memory
from bflcore.options import Component

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.messages import Broadcast, Cohort, LocalResult
    from bflcore.posteriors import Posterior
    from bflcore.problem import Problem
    from bflcore.problem.likelihoods import Predictive

__all__ = ["Explorable", "LocalInference"]


class LocalInference(Component, abc.ABC):
    """Base of local inferences.

    `fit` is batched over clients: a cohort of K gives what K cohorts of one give, to rounding.
    """

    kind: ClassVar[str] = "inference"
    family: ClassVar[str]  # name of the posterior family that `fit` returns
    # Claims that `bflcore.testing` checks:
    # exact-conjugate  the exact posterior of linear regression with known noise, where each sample
    #                  depends on one parameter
    tags: ClassVar[frozenset[str]] = frozenset()

    def check(self, problem: Problem) -> None:
        """Raise `OptionError` for a problem that this inference cannot handle.

        Called once, before a run writes anything. By default every problem is accepted.
        """

    @abc.abstractmethod
    def initial(self, problem: Problem) -> Posterior:
        """Return the posterior ``[P]`` over all parameters before any data is seen."""

    def prior(self, problem: Problem) -> Posterior:
        """Return the first round's prior ``[P]``: by default the initial posterior."""
        return self.initial(problem)

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of a client that has not trained yet, without a client axis.

        By default its posterior over the personal parameters, as initialised.
        """
        return Memory(personal=self.initial(problem).split(problem.layout)[1]).pack()

    @abc.abstractmethod
    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Infer every client's posterior from its data, the start and the prior."""

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Return the memory ``[K, ...]`` with which the clients will predict.

        Called before each evaluation; clients of a `novel` cohort were held out of training and
        may adapt here, from their training data. By default the memory is unchanged.
        """
        return cohort.memory

    @abc.abstractmethod
    def predict(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Predictive:
        """Predict each client's own samples `x` ``[K, B, ...]``.

        From the server's posterior (``broadcast.start``), the clients' memories, and noise from
        ``cohort.streams("predict")``; the cohort's training data is not used.
        """


@runtime_checkable
class Explorable(Protocol):
    """An inference whose report shows more: predictions along an axis, and a loss landscape."""

    def curves(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Mapping[str, Mapping[float, Predictive]]:
        """Predict `x` along quantities of the method: axis name -> value -> prediction.

        Evaluation measures every prediction on the clients' test samples, and the report draws
        the metrics over the values.
        """

    def landmarks(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Return one or two networks ``[K, P]`` by label, through which the landscape is drawn."""
