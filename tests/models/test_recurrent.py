"""The recurrent networks against PyTorch's own LSTM, alone and many at once."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, vmap

from bflcore.models.recurrent import LSTM, StackedLSTM


def of_pytorch(ours):
    """Return PyTorch's layers with the same weights; theirs have a second bias, which is zero."""
    theirs = torch.nn.LSTM(
        ours.embedding.embedding_dim,
        ours.layers[0].hidden,
        len(ours.layers),
        batch_first=True,
        dtype=torch.float64,
    )
    with torch.no_grad():
        for k, layer in enumerate(ours.layers):
            getattr(theirs, f"weight_ih_l{k}").copy_(layer.weight_input)
            getattr(theirs, f"weight_hh_l{k}").copy_(layer.weight_hidden)
            getattr(theirs, f"bias_ih_l{k}").copy_(layer.bias)
            getattr(theirs, f"bias_hh_l{k}").zero_()
    return theirs


def stacked(layers=2):
    torch.manual_seed(0)
    network = StackedLSTM(characters=7, embedding=3, hidden=5, layers=layers, outputs=4).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return network


def codes(*shape):
    return torch.randint(7, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 9])
def test_outputs_and_gradients_are_those_of_pytorchs_lstm(layers, steps):
    ours, x = stacked(layers), codes(6, steps)
    theirs = of_pytorch(ours)
    states, _ = theirs(ours.embedding(x))
    expected = ours.head(states[:, -1])

    outputs = ours(x.double())  # codes arrive as real numbers

    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    shared = [ours.embedding.weight, ours.head.weight]
    one, other = (torch.autograd.grad(y.square().sum(), shared) for y in (outputs, expected))
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    ours(x).square().sum().backward()
    of_pytorch_gradients(theirs, ours, x)
    for k, layer in enumerate(ours.layers):
        for mine, name in (("weight_input", "weight_ih"), ("weight_hidden", "weight_hh")):
            found, wanted = getattr(layer, mine).grad, getattr(theirs, f"{name}_l{k}").grad
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(layer.bias.grad, getattr(theirs, f"bias_ih_l{k}").grad)


def of_pytorch_gradients(theirs, ours, x):
    states, _ = theirs(ours.embedding(x).detach())
    ours.head(states[:, -1]).square().sum().backward()


def test_a_cohort_of_networks_equals_each_alone():
    network, x = stacked(), codes(3, 2, 9).double()
    noise = torch.Generator().manual_seed(2)
    weights = {
        name: torch.stack([p + k * torch.randn(p.shape, generator=noise) / 9 for k in range(3)])
        for name, p in network.named_parameters()
    }

    def loss(weights, x):
        return functional_call(network, weights, (x,)).square().sum()

    together = vmap(grad(loss))(weights, x)
    for k in range(3):
        alone = grad(loss)({name: p[k] for name, p in weights.items()}, x[k])
        for name, value in alone.items():
            torch.testing.assert_close(together[name][k], value, rtol=1e-10, atol=1e-12)


def test_an_lstm_that_forgets_nothing_and_admits_nothing_keeps_its_state_at_zero():
    layer = LSTM(2, 3)
    with torch.no_grad():
        layer.weight_input.zero_()
        layer.weight_hidden.zero_()
        layer.bias[:3] = -100.0  # the gate of the input
    assert not layer(torch.randn(4, 5, 2)).any()


def test_only_the_bias_of_the_forget_gate_starts_at_one():
    layer = LSTM(3, 4)
    assert layer.bias.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8
    for weight in (layer.weight_input, layer.weight_hidden):
        assert 0.3 < float(weight.detach().abs().max()) <= 0.5  # 1/sqrt(hidden)
