"""FedRep, FedBABU and fine-tuned FedAvg: training in stages, then fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from bflcore import OptionError, Point, PointInference, component, option
from bflcore.inference.memory import join_personal, keep_own
from bflcore.inference.point import descend, fit_points, objective

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Problem

__all__ = ["Staged", "fine_tune"]


@component
class Staged(PointInference):
    """Train all parameters, or body and head in turn, or the body; fine-tune to predict."""

    name = "staged"
    reference = "Collins et al. 2021 (FedRep), Algorithm 1; Oh et al. 2022 (FedBABU), Algorithm 1"

    stages: str = option(
        "joint",
        "parameters trained in a round: all, the personal and then the shared ones, or only the "
        "shared ones",
        choices=("joint", "personal-then-shared", "shared"),
    )
    personal_epochs: int = option(
        10,
        "epochs per round on the personal parameters (`personal-then-shared`; those on the shared "
        "ones are `local_epochs`)",
        at_least=1,
    )
    fine_tune_epochs: int = option(
        0, "fine-tuning epochs before each evaluation (the shared model is unaffected)", at_least=0
    )

    def check(self, problem: Problem) -> None:
        """Raise `OptionError` for stages if all parameters are shared or all are personal."""
        layout = problem.layout
        if self.stages != "joint" and not (layout.personal_total and layout.shared_total):
            empty = "shared" if layout.personal_total else "personal"
            raise OptionError(
                f"inference.stages: {self.stages!r} needs both shared and personal parameters, but "
                f"none are {empty}; use --share body, --share head or -o inference.stages=joint"
            )

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train every client stage by stage."""
        if self.stages == "joint":
            return fit_points(self, problem, broadcast, cohort)
        if self.stages == "personal-then-shared":
            memory = self._fit_personal(problem, broadcast, cohort)
            cohort = attrs.evolve(cohort, memory=memory)
        return fit_points(self, problem, broadcast, cohort, "shared")

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Fit the personal parameters of novel clients, then fine-tune all parameters.

        Stages that never train the personal parameters do not do so for novel clients either.
        """
        memory = cohort.memory
        if cohort.novel and problem.layout.personal_total and self.stages != "shared":
            memory = self._fit_personal(problem, broadcast, cohort)
        if not self.fine_tune_epochs:
            return memory
        longer = self.replace(local_epochs=self.fine_tune_epochs)
        return fine_tune(longer, problem, broadcast, attrs.evolve(cohort, memory=memory))

    def _fit_personal(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Return the memories after training the personal parameters; the shared ones are fixed."""
        staged = self.stages == "personal-then-shared"
        epochs = self.personal_epochs if staged else self.local_epochs
        trained = self.replace(local_epochs=epochs)
        return fit_points(trained, problem, broadcast, cohort, "personal").memory


def fine_tune(
    inference: PointInference, problem: Problem, broadcast: Broadcast, cohort: Cohort
) -> dict[str, Tensor]:
    """Return memories with the networks ``[K, P]`` after training on each client's samples."""
    start = join_personal(problem, broadcast.start, cohort).mean
    loss_and_gradient = objective(inference, problem, cohort, start)
    weights, _ = descend(inference, problem, cohort, start, loss_and_gradient)
    return keep_own(cohort.memory, Point(weights))
