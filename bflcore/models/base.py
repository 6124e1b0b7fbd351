"""What a model is: a network that declares its head."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

from bflcore.lazy import lazy
from bflcore.options import Component

if TYPE_CHECKING:
    from torch import nn

    from bflcore.models import networks
else:
    networks = lazy("bflcore.models.networks")

__all__ = ["Model"]


class Model(Component, abc.ABC):
    """Base of models that ``--model NAME`` finds."""

    kind: ClassVar[str] = "model"

    @abc.abstractmethod
    def network(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the network for samples of `input_shape` (without the batch axis).

        The network takes ``[B, *input_shape]`` and returns ``[B, outputs]`` (logits, or means
        of a regression). Raises `OptionError` when the input does not suit the model.
        """

    def head(self, network: nn.Module) -> str:
        """Return the module path of the head, the decision layer: by default the last linear."""
        return networks.last_linear(network)
