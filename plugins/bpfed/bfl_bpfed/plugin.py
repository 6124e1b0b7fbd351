"""The method `bpfed` and its inference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bflcore import Continual, Equal, Method, VariationalInference, component, hookimpl, option

if TYPE_CHECKING:
    from bflcore import Broadcast, Cohort, LocalInference, LocalResult, Problem


@component
class ReinforcedVariational(VariationalInference):
    """Fit a mean-field Gaussian; transmit a copy of the prior that is pulled towards it (eq. 11).

    With ``reinforce_steps = 0`` the fitted posterior itself is transmitted.
    """

    name = "reinforced-variational"
    reference = "Chen et al. 2023 (BPFed), eq. 7, 10, 11; Zhang et al. 2022 (pFedBayes), Alg. 1"

    reinforce_steps: int = option(
        0, "steps of the transmitted copy on the KL term after each local step", at_least=0
    )
    reinforce_lr: float = option(1e-3, "learning rate of those steps", above=0)

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Minimise Q_i (eq. 10), the transmitted copy following by eq. 11."""
        from bfl_bpfed import reinforcement

        return reinforcement.fit(self, problem, broadcast, cohort)


class BPFed(Method):
    """Share a Gaussian body, keep a Gaussian head; each round's prior is the last's result."""

    name = "bpfed"
    reference = "Chen, Liu, Cao & Zhang 2023, Algorithm 1"
    inference = ReinforcedVariational(
        personal_prior="previous",
        # Chosen on Fashion-MNIST; the README says what each of them is worth.
        initial_sigma=0.2,
        kl_weight=0.3,
        lr_decay=0.03,
        lr_decay_after=50,
    )
    weighting = Equal()
    hyper = Continual()
    share = "body"


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the inference of eq. 10 and 11."""
    yield ReinforcedVariational


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield BPFed."""
    yield BPFed
