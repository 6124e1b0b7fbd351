"""The base of Ditto, APFL and pFedMe: every client trains a second network of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bflcore import PointInference, component
from bflcore.inference.memory import OwnPosterior

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore import Broadcast, Cohort, Problem

__all__ = ["PersonalNetwork"]


@component
class PersonalNetwork(PointInference):
    """Base of point estimates whose clients keep a network of their own and predict with it."""

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of a client that does not have a network of its own yet."""
        none_yet = OwnPosterior.empty(self.initial(problem))
        return {**super().initial_memory(problem), **none_yet.pack()}

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Train novel clients as in a round, without sending anything."""
        return self.fit(problem, broadcast, cohort).memory if cohort.novel else cohort.memory
