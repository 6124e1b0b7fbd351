"""The method `bpfed` and the hooks of this plugin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from bfl_bpfed.bpfed import ReinforcedVariational
from bflcore import Method, hookimpl

if TYPE_CHECKING:
    from bflcore import LocalInference


class BPFed(Method):
    """Share a Gaussian body, keep a Gaussian head; each round's prior is the last's result."""

    name = "bpfed"
    reference = "Chen, Liu, Cao & Zhang 2023, Algorithm 1"
    inference = "reinforced-variational"
    weighting = "equal"
    hyper = "continual"
    share = "body"
    defaults: ClassVar[Mapping[str, object]] = {
        "inference.personal_prior": "previous",
        # Found on Fashion-MNIST; the README tells what each of them is worth.
        "inference.initial_sigma": 0.2,
        "inference.kl_weight": 0.3,
        "inference.lr_decay": 0.03,
        "inference.lr_decay_after": 50,
    }


@hookimpl
def bfl_inferences() -> Iterator[type[LocalInference]]:
    """Yield the inference of eq. 10 and 11."""
    yield ReinforcedVariational


@hookimpl
def bfl_methods() -> Iterator[type[Method]]:
    """Yield BPFed."""
    yield BPFed
