"""The base class of models, which build a network and name its head."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

from bflcore.lazy import lazy
from bflcore.options import Component

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bflcore.models import networks
else:
    networks = lazy("bflcore.models.networks")

__all__ = ["Model"]


class Model(Component, abc.ABC):
    """Base of models; ``--model NAME`` selects one."""

    kind: ClassVar[str] = "model"
    # Whether each parameter is the coefficient of one feature, or an intercept (the second tensor):
    # weight [T, F], bias [T]. Then a category of a table is its difference from a reference.
    interpretable: ClassVar[bool] = False

    @abc.abstractmethod
    def network(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the network for samples of `input_shape` (without the batch axis).

        The network maps ``[B, *input_shape]`` to ``[B, outputs]`` (logits, or regression means).
        Raises `OptionError` if the model cannot handle this input shape.
        """

    def check_samples(self, x: Tensor) -> None:
        """Raise `OptionError` if the model cannot read the values of the samples `x` ``[N, ...]``.

        Called before the run with the samples of all clients. The default accepts all numbers.
        """

    def head(self, network: nn.Module) -> str:
        """Return the module path of the head, the decision layer (default: the last linear one)."""
        return networks.last_linear(network)
