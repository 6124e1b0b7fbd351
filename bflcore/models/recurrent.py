"""Recurrent networks, written with linear operations alone.

PyTorch's own recurrent layers have no rule for `torch.func.vmap`; these run many parameter sets at
once. Their weights are used once per step of a sequence and belong to no linear layer, so that
estimators with noise inside linear layers draw them whole (see `bflcore.inference.estimators`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LSTM", "StackedLSTM"]


class LSTM(nn.Module):
    """One layer of long short-term memory: ``[B, T, inputs]`` -> ``[B, T, hidden]``.

    i, f, o = sigmoid(W x_t + U h_{t-1} + b), g = tanh(the same with weights of its own),
    c_t = f c_{t-1} + i g, h_t = o tanh(c_t), starting at zero; the gates are stored in the order
    i, f, g, o, with one bias each. The bias of f starts at 1, so that cells remember at first; all
    else as in PyTorch. Reference: Hochreiter and Schmidhuber 1997; f: Gers et al. 2000.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight_input = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.weight_hidden = nn.Parameter(torch.empty(4 * hidden, hidden))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(hidden**-0.5), hidden**-0.5)
        gates = torch.tensor([0.0, 1.0, 0.0, 0.0])
        self.bias = nn.Parameter(gates.repeat_interleave(hidden))
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        """Return the state after every step ``[B, T, hidden]``."""
        driven = functional.linear(x, self.weight_input, self.bias)
        state = cell = x.new_zeros(len(x), self.hidden)
        states = []
        for step in driven.unbind(1):
            gates = step + functional.linear(state, self.weight_hidden)
            i, f, g, o = gates.chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states, 1)


class StackedLSTM(nn.Module):
    """LEAF's language model: ``[B, T]`` character codes -> ``[B, outputs]``.

    An embedding, layers of LSTM, and a linear head on the last layer's state after the last
    character. Codes are whole numbers in `x`, whatever its type.
    Reference: Caldas et al. 2018, after McMahan et al. 2017, section 3.
    """

    def __init__(
        self, characters: int, embedding: int, hidden: int, layers: int, outputs: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        widths = (embedding, *(hidden,) * (layers - 1))
        self.layers = nn.Sequential(*(LSTM(width, hidden) for width in widths))
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[B, outputs]``."""
        states = self.layers(self.embedding(x.long()))
        logits: Tensor = self.head(states[:, -1])
        return logits
