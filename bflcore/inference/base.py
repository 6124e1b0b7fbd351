"""The seam of local inference: how a client's data turns a prior into a posterior."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from bflcore.inference.memory import PERSONAL, client_posterior
from bflcore.options import Component

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.messages import Broadcast, Cohort, LocalResult
    from bflcore.posteriors import Posterior
    from bflcore.problem import Problem
    from bflcore.problem.likelihoods import Predictive

__all__ = ["LocalInference"]


class LocalInference(Component, abc.ABC):
    """Base of local inferences.

    `fit` is batched over clients: a cohort of K gives what K cohorts of one give, to rounding.
    """

    kind: ClassVar[str] = "inference"
    family: ClassVar[str]  # name of the posterior family that `fit` returns
    # Claims that `bflcore.testing` checks:
    # exact-conjugate  Bayes' own posterior for linear regression with known noise, each sample
    #                  seeing one parameter
    tags: ClassVar[frozenset[str]] = frozenset()

    def check(self, problem: Problem) -> None:
        """Refuse a problem that this inference cannot work on: raise `OptionError`.

        Called once, before a run writes anything; by default every problem is welcome.
        """

    @abc.abstractmethod
    def initial(self, problem: Problem) -> Posterior:
        """Return the posterior ``[P]`` over all parameters before any data is seen."""

    def prior(self, problem: Problem) -> Posterior:
        """Return the first round's prior ``[P]``: by default the initial posterior."""
        return self.initial(problem)

    def remember(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of one client that has not taken part yet (no client axis).

        By default its posterior over the personal coordinates, as initialised.
        """
        return self.initial(problem).split(problem.layout)[1].pack(PERSONAL)

    @abc.abstractmethod
    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Infer every cohort member's posterior from its data, the start and the prior."""

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, novel: bool
    ) -> Mapping[str, Tensor]:
        """Return the memory ``[K, ...]`` with which the clients will predict.

        Called before each evaluation; a `novel` client was held out of training and may adapt
        here, from its training data. By default nothing changes.
        """
        return cohort.memory

    @abc.abstractmethod
    def predict(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Predictive:
        """Predict each client's own samples `x` ``[K, B, ...]``.

        `posterior` ``[P_shared]`` is the server's; `memory` ``[K, ...]`` the clients'.
        """

    def curves(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Mapping[str, Mapping[float, Predictive]]:
        """Predict `x` along quantities of the method: axis name -> value -> prediction.

        Arguments are those of `predict`. Evaluation measures every prediction on the clients'
        test samples, and the report draws the figures over the values; by default none.
        """
        return {}

    def landmarks(
        self, problem: Problem, posterior: Posterior, memory: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return one or two networks ``[K, P]`` by label, through which landscapes are drawn.

        By default the mean of what each client predicts with.
        """
        clients = len(next(iter(memory.values()))) if memory else 1
        return {"client": client_posterior(problem, posterior, memory, clients).mean}
