"""Weightings: how much each client counts in the fusion."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from bflcore.errors import OptionError, blamed
from bflcore.lazy import lazy
from bflcore.options import Component, component

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.messages import Broadcast, LocalResult
    from bflcore.posteriors import Posterior
else:
    torch = lazy("torch")

__all__ = ["Equal", "Examples", "Weighting", "check_weights"]


class Weighting(Component, abc.ABC):
    """Base of weightings: how much each client counts in the fusion."""

    kind: ClassVar[str] = "weighting"
    families: ClassVar[tuple[str, ...]] = ()  # posterior families it can weigh; empty: any
    local: ClassVar[bool] = True  # weighs a client by its own result and the broadcast alone

    @abc.abstractmethod
    def weigh(self, posteriors: Posterior, examples: Tensor, broadcast: Broadcast) -> Tensor:
        """Return weights ``[K]`` in float64, of any scale.

        A `local` weighting sees some of the round's clients at a time; others all of them at once.
        """

    def weigh_each(
        self, results: Iterable[LocalResult], broadcast: Broadcast
    ) -> Iterator[tuple[LocalResult, Tensor]]:
        """Yield every client's result with its weight ``[1]``.

        A weighting that is not `local` waits for all results. Raises `OptionError` if its weights
        are invalid, `RoundError` if `weigh` fails.
        """
        number = broadcast.round + 1
        if self.local:
            for result in results:
                with blamed(self, number):
                    weights = self.weigh(result.posterior, result.examples, broadcast)
                yield result, weights
        elif waiting := list(results):
            posteriors = type(broadcast.start).concatenate([one.posterior for one in waiting])
            examples = torch.cat([one.examples for one in waiting])
            with blamed(self, number):
                weights = self.weigh(posteriors, examples, broadcast)
            check_weights(weights, len(waiting), [one.clients[0] for one in waiting])
            yield from zip(waiting, weights.split(1), strict=True)


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
    """Raise `OptionError` unless `weights` ``[K]`` are finite, at least 0 and not all 0.

    `names` are the clients' ids, for the message; by default their rows.
    """
    if tuple(weights.shape) != (clients,):
        raise OptionError(
            f"weights: {tuple(weights.shape)} given for {clients} posteriors; "
            f"allowed: one weight per client, shape ({clients},)"
        )
    for client, weight in zip(names or range(clients), weights.tolist(), strict=True):
        if not (0 <= weight < float("inf")):
            raise OptionError(
                f"weights: {weight} given for client {client}; allowed: a finite number >= 0"
            )
    if clients and not bool(weights.sum() > 0):
        raise OptionError("weights: all are zero; allowed: at least one above 0")
