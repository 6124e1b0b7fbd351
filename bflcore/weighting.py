"""Weightings: how much each client counts in the fusion."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from bflcore.errors import OptionError
from bflcore.options import Component, component

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.messages import Broadcast
    from bflcore.posteriors import Posterior

__all__ = ["Equal", "Examples", "Weighting", "check_weights"]


class Weighting(Component, abc.ABC):
    """Base of weightings: how much each client counts in the fusion."""

    kind: ClassVar[str] = "weighting"
    families: ClassVar[tuple[str, ...]] = ()  # posterior families it can weigh; empty: any
    local: ClassVar[bool] = True  # a client's own result and the broadcast suffice

    @abc.abstractmethod
    def weigh(self, posteriors: Posterior, examples: Tensor, broadcast: Broadcast) -> Tensor:
        """Return weights ``[K]`` in float64, of any scale.

        A `local` weighting sees any part of the round's clients at a time; others all of them.
        """


@component
class Examples(Weighting):
    """Weigh each client by its number of training samples."""

    name = "examples"
    reference = "McMahan et al. 2017, Algorithm 1"

    def weigh(self, posteriors: Posterior, examples: Tensor, broadcast: Broadcast) -> Tensor:
        """Return n_k."""
        return examples.double()


@component
class Equal(Weighting):
    """Weigh all clients equally."""

    name = "equal"
    reference = "Chen et al. 2023 (BPFed), Algorithm 1"

    def weigh(self, posteriors: Posterior, examples: Tensor, broadcast: Broadcast) -> Tensor:
        """Return ones."""
        return examples.double().new_ones(len(examples))


def check_weights(weights: Tensor, clients: int, names: Sequence[int] = ()) -> None:
    """Refuse weights that are not K finite numbers >= 0 with a positive sum.

    `names` are the clients' ids, for the message; by default their rows.
    """
    if tuple(weights.shape) != (clients,):
        raise OptionError(
            f"weights: {tuple(weights.shape)} given for {clients} posteriors; "
            f"allowed: one weight a client, shape ({clients},)"
        )
    for client, weight in zip(names or range(clients), weights.tolist(), strict=True):
        if not (0 <= weight < float("inf")):
            raise OptionError(
                f"weights: {weight} given for client {client}; allowed: a finite number >= 0"
            )
    if clients and not bool(weights.sum() > 0):
        raise OptionError("weights: all are zero; allowed: at least one above 0")
