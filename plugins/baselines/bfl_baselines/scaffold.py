"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from bflcore import OptionError, Point, PointInference, component, option
from bflcore.inference.gradient import steps
from bflcore.inference.memory import Memory
from bflcore.inference.point import fit_points
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Problem
    from bflcore.inference.gradient import Batch
    from bflcore.inference.point import LossAndGradient
else:
    torch = lazy("torch")

__all__ = ["ControlVariates"]

CONTROL = "control"  # key of the control variates in statistics and in the server's state


@attrs.frozen(eq=False, kw_only=True)
class ControlVariate(Memory):
    """The memory of a client: its control variate."""

    control: Tensor  # c_i ``[P_shared]``


@component
class ControlVariates(PointInference):
    """Correct every step by the difference of the server's and the client's control variates.

    Use with ``--hyper accumulate``, which keeps the server's control variate. Control variates are
    averages of a round's gradients, so every step must be plain gradient descent.
    """

    name = "scaffold"
    reference = "Karimireddy et al. 2020 (SCAFFOLD), Algorithm 1, option II"

    optimiser: str = option(
        "sgd", "update rule (control variates need sgd)", choices=("adam", "sgd")
    )

    def check(self, problem: Problem) -> None:
        """Raise `OptionError` unless the update rule is plain gradient descent."""
        rule = {"optimiser": (self.optimiser, "sgd"), "momentum": (self.momentum, 0.0)}
        for name, (given, allowed) in rule.items():
            if given != allowed:
                raise OptionError(
                    f"inference.{name}: {given!r} is not allowed; allowed: {allowed!r} (the "
                    "control variates of scaffold are averages of plain gradients)"
                )

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return a memory with a control variate of zero."""
        zero = problem.initial.new_zeros(problem.layout.shared_total)
        return {**super().initial_memory(problem), **ControlVariate(control=zero).pack()}

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train y_i from x along g + c - c_i, then update c_i.

        Clients send (c_i+ - c_i) / N; the sum over the S clients of a round is the update of the
        server's control variate, c += S/N mean(c_i+ - c_i).
        """
        layout, of_client = problem.layout, ControlVariate.unpack(cohort.memory, Point).control
        of_server = broadcast.hyper.get(CONTROL, torch.zeros_like(of_client[0]))
        correction = layout.join(
            of_server - of_client, of_client.new_zeros(len(of_client), layout.personal_total)
        )

        def corrected(
            loss_and_gradient: LossAndGradient, y: Tensor, batch: Batch
        ) -> tuple[Tensor, Tensor]:
            loss, gradient = loss_and_gradient(y, batch)
            return loss, gradient + correction[: len(y)]  # line 10

        result = fit_points(self, problem, broadcast, cohort, transform=corrected)
        # Line 12, option II: c_i+ = c_i - c + (x - y_i) / (steps lr)
        taken = of_client.new_tensor(steps(self, cohort))[:, None]
        moved = broadcast.start.mean - result.posterior.mean
        drift = moved / (taken.clamp_min(1) * self.lr_at(cohort.round))
        change = torch.where(taken > 0, drift - of_server, torch.zeros_like(drift))
        memory = {**result.memory, **ControlVariate(control=of_client + change).pack()}
        return attrs.evolve(
            result, statistics={CONTROL: change / len(problem.clients)}, memory=memory
        )
