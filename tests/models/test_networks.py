"""The networks compute what their papers say, one sample at a time in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn

from bflcore.errors import OptionError
from bflcore.models.networks import (
    VGG,
    LeNet,
    MobileNet,
    Perceptron,
    Residual,
    ResNet20,
    TwoCNN,
    check_network,
    last_linear,
    unbatchable,
)

GROUPS = 4


def convolve(x, weights, layer, padding, stride=1):
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding)))
    kernel = weights[f"{layer}.weight"]
    windows = sliding_window_view(x, kernel.shape[2:], axis=(1, 2))[:, ::stride, ::stride]
    bias = weights.get(f"{layer}.bias", np.zeros(len(kernel)))
    return np.einsum("ihwkl,oikl->ohw", windows, kernel) + bias[:, None, None]


def pool(x):
    c, h, w = x.shape
    return x[:, : h // 2 * 2, : w // 2 * 2].reshape(c, h // 2, 2, w // 2, 2).max((2, 4))


def dense(x, weights, layer):
    return weights[f"{layer}.weight"] @ x + weights[f"{layer}.bias"]


def group_norm(x, weights, layer):
    grouped = x.reshape(GROUPS, -1)
    spread = np.sqrt(grouped.var(1, keepdims=True) + 1e-5)
    scaled = ((grouped - grouped.mean(1, keepdims=True)) / spread).reshape(x.shape)
    scale, shift = weights[f"{layer}.weight"], weights[f"{layer}.bias"]
    return scaled * scale[:, None, None] + shift[:, None, None]


def relu(x):
    return np.maximum(x, 0)


def lenet_reference(x, weights, padding):
    x = pool(relu(convolve(x, weights, "conv1", padding)))
    x = pool(relu(convolve(x, weights, "conv2", 0)))
    x = relu(dense(x.ravel(), weights, "dense1"))
    return dense(relu(dense(x, weights, "dense2")), weights, "head")


def two_cnn_reference(x, weights):
    x = pool(relu(convolve(x, weights, "conv1", 2)))
    x = pool(relu(convolve(x, weights, "conv2", 2)))
    return dense(relu(dense(x.ravel(), weights, "dense")), weights, "head")


def resnet20_reference(x, weights):
    x = relu(group_norm(convolve(x, weights, "conv", 1), weights, "norm"))
    for i in range(9):
        block, stride = f"blocks.{i}", 2 if i in (3, 6) else 1
        y = convolve(x, weights, f"{block}.conv1", 1, stride)
        y = relu(group_norm(y, weights, f"{block}.norm1"))
        y = group_norm(convolve(y, weights, f"{block}.conv2", 1), weights, f"{block}.norm2")
        if stride == 2:
            zeros = np.zeros((len(x) // 2, *y.shape[1:]))
            x = np.concatenate([zeros, x[:, ::2, ::2], zeros])
        x = relu(x + y)
    return dense(x.mean((1, 2)), weights, "head")


def mobilenet_reference(x, weights):
    x = relu(group_norm(convolve(x, weights, "conv", 1, 1), weights, "norm"))
    for i in range(13):
        block, stride = f"blocks.{i}", 2 if i in (1, 3, 5, 11) else 1
        # Each channel by itself: a kernel that is zero for all other channels.
        each = weights[f"{block}.depthwise.weight"][:, 0]
        kernel = np.zeros((len(x), len(x), 3, 3))
        kernel[np.arange(len(x)), np.arange(len(x))] = each
        x = convolve(x, {"wide.weight": kernel}, "wide", 1, stride)
        x = relu(group_norm(x, weights, f"{block}.norm1"))
        x = convolve(x, weights, f"{block}.pointwise", 0)
        x = relu(group_norm(x, weights, f"{block}.norm2"))
    return dense(x.mean((1, 2)), weights, "head")


def vgg_reference(x, weights):
    convolutions = sorted(
        int(name.split(".")[1]) for name, value in weights.items() if value.ndim == 4
    )
    for i in convolutions:
        x = convolve(x, weights, f"features.{i}", 1)
        x = relu(group_norm(x, weights, f"features.{i + 1}"))
        if i + 3 not in convolutions:  # the end of a stage; an odd side keeps its last pixel
            odd = [(0, side % 2) for side in x.shape[1:]]
            x = pool(np.pad(x, ((0, 0), *odd)))  # rectified values are at least the padding
    return dense(x.mean((1, 2)), weights, "head")


def scattered(network):
    """Give every parameter, scales and shifts included, a value of its own."""
    generator = torch.Generator().manual_seed(0)
    network = network.double()
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.2 * noise)
    return network, {name: p.detach().numpy() for name, p in network.named_parameters()}


def samples(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, *shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("build", "shape", "reference"),
    [
        (lambda: LeNet(1, 28, 28, 10), (1, 28, 28), lambda x, w: lenet_reference(x, w, 2)),
        (lambda: LeNet(3, 32, 32, 7), (3, 32, 32), lambda x, w: lenet_reference(x, w, 0)),
        (lambda: LeNet(2, 15, 40, 3), (2, 15, 40), lambda x, w: lenet_reference(x, w, 2)),
        (lambda: TwoCNN(1, 8, 11, 5), (1, 8, 11), two_cnn_reference),
        (lambda: ResNet20(3, 10, "group", GROUPS), (3, 11, 8), resnet20_reference),
        (
            lambda: MobileNet(3, 10, 0.25, "group", GROUPS, small=True),
            (3, 17, 24),
            mobilenet_reference,
        ),
        (lambda: VGG(3, 5, 11, "group", GROUPS), (3, 9, 14), vgg_reference),
    ],
    ids=["lenet-28", "lenet-32", "lenet-oblong", "two-cnn", "resnet20", "mobilenet", "vgg"],
)
def test_convolutional_networks_equal_a_reference_in_numpy(build, shape, reference):
    network, weights = scattered(build())
    x = samples(*shape)

    with torch.no_grad():
        logits = network(x)

    expected = np.stack([reference(sample, weights) for sample in x.numpy()])
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("activation", "nonlinearity"), [("relu", relu), ("tanh", np.tanh)])
def test_a_perceptron_applies_its_activation_between_layers_only(activation, nonlinearity):
    network, weights = scattered(Perceptron(12, (5, 4), 3, activation))
    x = samples(3, 4)

    with torch.no_grad():
        logits = network(x)

    expected = []
    for sample in x.numpy():
        y = nonlinearity(dense(sample.ravel(), weights, "hidden.0"))
        expected.append(dense(nonlinearity(dense(y, weights, "hidden.1")), weights, "head"))
    np.testing.assert_allclose(logits.numpy(), np.stack(expected), rtol=1e-12, atol=1e-12)


def test_a_perceptron_without_hidden_layers_is_linear():
    network, weights = scattered(Perceptron(4, (), 2))
    x = samples(4)

    with torch.no_grad():
        logits = network(x)

    expected = x.numpy() @ weights["head.weight"].T + weights["head.bias"]
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_resnet20_has_twenty_layers_with_weights():
    layers = [m for m in ResNet20(3, 10).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 20


def test_convolutions_have_a_bias_only_where_no_norm_follows():
    def biases(norm):
        convolutions = (m for m in Residual(4, 8, norm, 2).modules() if isinstance(m, nn.Conv2d))
        return [m.bias is not None for m in convolutions]

    assert biases("none") == [True, True]
    assert biases("group") == [False, False]


@pytest.mark.parametrize("norm", ["group", "none"])
def test_no_norm_lets_one_sample_change_another(norm):
    x = samples(3, 8, 8)
    network, _ = scattered(ResNet20(3, 4, norm, GROUPS))
    with torch.no_grad():
        torch.testing.assert_close(network(x)[:2], network(x[:2]), atol=1e-9, rtol=0)


def test_the_last_linear_layer_is_the_one_registered_last():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
            self.scale = nn.LayerNorm(2)

    assert last_linear(Nested()) == "classifier.2"


@pytest.mark.parametrize("network", [nn.Conv2d(1, 1, 1), nn.Linear(2, 2)])
def test_a_network_without_a_linear_layer_inside_has_no_default_head(network):
    with pytest.raises(OptionError, match=r"contains no linear layer .* declare the head"):
        last_linear(network)


def refusal(network, shape=(3,)):
    with pytest.raises(OptionError) as refused:
        check_network(network, torch.randn(2, *shape))
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm2d(3, affine=False),
        nn.InstanceNorm2d(3, track_running_stats=True),
    ],
)
def test_running_statistics_are_refused_with_the_layer_and_the_fix(layer):
    message = refusal(nn.Sequential(nn.Linear(3, 3), nn.Sequential(layer)))
    assert f"layer 1.0 ({type(layer).__name__})" in message
    assert "nn.GroupNorm" in message


def test_statistics_of_the_batch_are_refused_with_the_layer_and_the_fix():
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    message = refusal(nn.Sequential(nn.Linear(3, 3), norm))
    assert "layer 1 (BatchNorm1d)" in message
    assert "nn.GroupNorm" in message


class Functional(nn.Module):
    """Dropout that no layer declares."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return nn.functional.dropout(self.head(x), 0.5)


@pytest.mark.parametrize(
    ("network", "where"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3)), "layer 1 (Dropout)"),
        (nn.Sequential(nn.RReLU()), "layer 0 (RReLU)"),
        (Functional(), "draws random numbers when it predicts, so"),
    ],
)
def test_random_numbers_in_the_forward_pass_are_refused_with_the_layer_and_the_fix(network, where):
    message = refusal(network)
    assert where in message
    assert "mc-dropout" in message


def test_dropout_that_never_drops_is_accepted():
    check_network(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), torch.randn(2, 3))


def test_layers_of_one_sample_alone_are_accepted():
    constant = nn.Identity()
    constant.register_buffer("positions", torch.arange(3))
    check_network(
        nn.Sequential(nn.GroupNorm(1, 3), nn.LayerNorm([3, 4, 4]), nn.InstanceNorm2d(3), constant),
        torch.randn(2, 3, 4, 4),
    )


class Gate(nn.Module):
    """Scales its inputs by their largest value, as a Python number."""

    def forward(self, x):
        return x / max(1.0, x.max().item())


class Branch(nn.Module):
    """Takes one of two ways, by the sign of a sum."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList([nn.Tanh(), nn.Sequential(nn.ReLU())])

    def forward(self, x):
        return self.ways[0](x) if x.sum() > 0 else self.ways[1](x)


class Whole(nn.Module):
    """Branches itself, outside of all layers."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        logits = self.head(x)
        return logits if logits.sum() > 0 else -logits


@pytest.mark.parametrize(
    ("network", "where", "why"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.Sequential(Gate(), nn.ReLU())), "layer 1.0 (Gate)",
         "item()"),
        (nn.Sequential(Branch(), nn.Linear(4, 2)), "layer 0 (Branch)", "control flow"),
        (Whole(), "Whole", "control flow"),
    ],
)  # fmt: skip
def test_a_network_that_cannot_be_batched_over_clients_is_described_by_the_layer(
    network, where, why
):
    found = unbatchable(network, torch.randn(2, 4))
    assert found.startswith(f"{where} fails under torch.func.vmap (RuntimeError: vmap: ")
    assert why in found
    assert "\n" not in found
    assert unbatchable(network, torch.randn(2, 4)) == found  # no hooks are left behind


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (Perceptron(4, (3,), 2), (4,)),
        (TwoCNN(1, 8, 8, 2), (1, 8, 8)),
        (LeNet(1, 28, 28, 2), (1, 28, 28)),
        (ResNet20(3, 2), (3, 8, 8)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_networks_of_the_core_can_be_batched_over_clients(network, shape):
    assert unbatchable(network, torch.randn(2, *shape)) == ""
