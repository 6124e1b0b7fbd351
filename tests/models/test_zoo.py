"""The core's models: published sizes, many parameter sets at once, and what they refuse."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import cache

import pytest
import torch
from torch.func import functional_call, vmap

from bflcore.errors import OptionError
from bflcore.inference.gradient import Batch, Gradient
from bflcore.layout import Layout
from bflcore.models import (
    MLP,
    MODELS,
    VGG,
    LeNet,
    Linear,
    MobileNet,
    ResNet18,
    ResNet20,
    StackedLSTM,
    TwoCNN,
    TwoNN,
)
from bflcore.models.networks import check_network
from bflcore.options import build
from bflcore.problem import Problem, Shares
from bflcore.problem.likelihoods import Categorical

# The smallest image that each model takes keeps the tests short.
SMALL = {
    "mlp": (MLP(hidden=(7,)), (5,)),
    "mlp-tanh": (MLP(hidden=(4, 3), activation="tanh"), (2, 3)),
    "linear": (Linear(), (2, 3)),
    "two-nn": (TwoNN(), (13,)),
    "two-cnn": (TwoCNN(), (2, 4, 5)),
    "lenet": (LeNet(), (1, 12, 13)),
    "lenet-32": (LeNet(), (3, 32, 32)),
    "resnet20": (ResNet20(), (1, 8, 8)),
    "resnet20-none": (ResNet20(norm="none"), (1, 8, 8)),
    "resnet18": (ResNet18(), (1, 8, 8)),
    "resnet18-stem": (ResNet18(small_images=False), (3, 32, 32)),
    "mobilenet": (MobileNet(width=0.25), (1, 17, 18)),
    "mobilenet-stem": (MobileNet(width=0.25, small_images=False, norm="none"), (3, 33, 34)),
    "vgg": (VGG(groups=8), (1, 8, 9)),
    "vgg-none": (VGG(norm="none"), (3, 8, 8)),
    "stacked-lstm": (StackedLSTM(characters=5, embedding=3, hidden=4), (6,)),
    "stacked-lstm-3": (StackedLSTM(characters=4, hidden=3, layers=3), (2,)),
}

each = pytest.mark.parametrize("which", SMALL)


@cache
def built(which, outputs=3):
    """Build each network once, in float64; tests do not change it."""
    model, shape = SMALL[which]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model.network(shape, outputs).double()


def samples(which, *leading):
    generator = torch.Generator().manual_seed(1)
    model, shape = SMALL[which]
    if isinstance(model, StackedLSTM):
        codes = torch.arange(math.prod((*leading, *shape))) % model.characters
        return codes.reshape(*leading, *shape).double()
    return torch.randn(*leading, *shape, generator=generator, dtype=torch.float64)


def count(build, *arguments, **options):
    """Count the parameters of a network built without drawing their values."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(*arguments, **options).parameters())


@pytest.mark.parametrize(
    ("model", "shape", "outputs", "expected"),
    [
        (MLP(), (1, 28, 28), 10, 79_510),
        (TwoNN(), (1, 28, 28), 10, 199_210),  # McMahan et al. 2017, section 3
        (TwoCNN(), (1, 28, 28), 10, 1_663_370),  # McMahan et al. 2017, section 3
        (LeNet(), (1, 28, 28), 10, 61_706),
        (LeNet(), (1, 32, 32), 10, 61_706),
        (LeNet(), (3, 32, 32), 10, 62_006),
        (ResNet20(), (3, 32, 32), 10, 269_722),  # He et al. 2016, table 6: 0.27 M
        (ResNet20(norm="none"), (3, 32, 32), 10, 269_034),  # 688 shifts, but no scales
        # Howard et al. 2017, table 6: 4.2, 2.6, 1.3 and 0.5 million
        (MobileNet(), (3, 224, 224), 1000, 4_231_976),
        (MobileNet(width=0.75), (3, 224, 224), 1000, 2_585_560),
        (MobileNet(width=0.5), (3, 224, 224), 1000, 1_331_592),
        (MobileNet(width=0.25), (3, 224, 224), 1000, 470_072),
        (MobileNet(), (3, 32, 32), 10, 4_231_976 - 990 * 1025),
        (VGG(), (3, 32, 32), 10, 9_228_362),
        (StackedLSTM(), (80,), 80, 817_872),
        (StackedLSTM(characters=90), (80,), 90, 817_872 + 10 * 8 + 10 * 257),
    ],
)
def test_models_have_the_published_number_of_parameters(model, shape, outputs, expected):
    assert count(model.network, shape, outputs) == expected


def test_resnet18_has_as_many_parameters_as_torchvisions():
    from bflcore.data.torchvision_import import torchvision

    original = count(torchvision().models.resnet18, num_classes=10)

    assert count(ResNet18().network, (3, 64, 64), 10) == original
    assert count(ResNet18(small_images=False).network, (3, 32, 32), 10) == original
    stem = 64 * 3 * (7 * 7 - 3 * 3)
    assert count(ResNet18().network, (3, 63, 64), 10) == original - stem
    assert count(ResNet18().network, (1, 64, 64), 10) == original - 64 * 2 * 7 * 7


def test_the_stacked_lstm_counts_as_many_parameters_as_leafs():
    # Per layer four gates, each with weights for the input and the state, and one bias.
    first, second = (4 * 256 * (inputs + 256 + 1) for inputs in (8, 256))
    expected = 80 * 8 + first + second + 256 * 80 + 80
    assert expected == 817_872
    assert count(StackedLSTM().network, (80,), 80) == expected


@pytest.mark.parametrize("depth", [11, 13, 16])
def test_vgg_has_torchvisions_convolutions(depth):
    from bflcore.data.torchvision_import import torchvision

    theirs = getattr(torchvision().models, f"vgg{depth}_bn")
    with torch.device("meta"):
        layers = list(theirs().features)
        ours = list(VGG(depth=depth).network((3, 64, 64), 10).features)
    assert [type(layer).__name__.replace("Batch", "Group").rstrip("2d") for layer in layers] == [
        type(layer).__name__.rstrip("2d") for layer in ours
    ]
    for one, other in zip(ours, layers, strict=True):
        if isinstance(one, torch.nn.Conv2d):
            assert one.weight.shape == other.weight.shape
            assert (one.stride, one.padding) == (other.stride, other.padding)
            assert one.bias is None  # the norm has one


@pytest.mark.parametrize(
    ("side", "vgg", "mobilenet"), [(28, 1, 2), (32, 1, 2), (64, 2, 2), (224, 7, 7)]
)
def test_image_sizes_of_the_data_sets_leave_some_pixels_for_the_mean(side, vgg, mobilenet):
    x = torch.zeros(1, 3, side, side, device="meta")
    with torch.device("meta"):
        networks = VGG().network((3, side, side), 10), MobileNet().network((3, side, side), 10)
    features = networks[0].features(x), networks[1].blocks(networks[1].conv(x))
    assert [tuple(each.shape[2:]) for each in features] == [(vgg, vgg), (mobilenet, mobilenet)]


def test_resnet18_keeps_small_images_large_until_the_residual_blocks():
    sizes = {}
    for which in ("resnet18", "resnet18-stem"):
        network = built(which)
        handle = network.layer1.register_forward_hook(
            lambda _, inputs, output, which=which: sizes.update({which: inputs[0].shape[-2:]})
        )
        with torch.no_grad():
            network(samples(which, 1))
        handle.remove()
    assert sizes == {"resnet18": (8, 8), "resnet18-stem": (8, 8)}  # of 8x8 and of 32x32


@each
def test_two_stacked_parameter_sets_equal_each_alone(which):
    network = built(which)
    generator = torch.Generator().manual_seed(2)
    stacked = {
        name: torch.stack([p, p + 0.05 * torch.randn(p.shape, generator=generator).double()])
        for name, p in network.named_parameters()
    }
    x = samples(which, 2, 2)  # [K, B, ...], each network on samples of its own

    with torch.no_grad():
        together = vmap(lambda weights, x: functional_call(network, weights, (x,)))(stacked, x)
        alone = [
            functional_call(network, {name: p[k] for name, p in stacked.items()}, (x[k],))
            for k in range(2)
        ]

    assert not torch.allclose(alone[0], alone[1])
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("which", [model.name for model in MODELS])
def test_a_cohorts_losses_and_gradients_equal_each_client_alone(which):
    network, (model, _) = built(which), SMALL[which]
    x, y = samples(which, 2, 3), torch.tensor([[0, 1, 2], [2, 1, 1]])
    shares = Shares.gather(x.flatten(0, 1), y.flatten(), [range(3), range(3, 6)])
    layout = Layout.of(network, model.head(network))
    initial = layout.flatten(dict(network.named_parameters()))
    of = Problem(network, layout, Categorical(), shares, shares, initial, (0, 1))
    weights = initial + 0.02 * torch.stack([torch.zeros_like(initial), initial.cos()])

    losses, gradients = Gradient(of)(weights, Batch(x, y, (3, 3)))
    again = Gradient(of)(weights, Batch(x, y, (3, 3)))

    assert torch.equal(losses, again[0])
    assert torch.equal(gradients, again[1])
    for k in range(2):
        alone = Gradient(of)(weights[[k]], Batch(x[[k]], y[[k]], (3,)))
        torch.testing.assert_close(losses[[k]], alone[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(gradients[[k]], alone[1], rtol=1e-7, atol=1e-9)


@each
def test_every_parameter_gets_a_finite_gradient(which):
    network = built(which)
    logits = network(samples(which, 2))
    assert logits.shape == (2, 3)
    assert logits.dtype == torch.float64

    gradients = torch.autograd.grad((logits - 1).square().sum(), list(network.parameters()))

    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


@each
def test_the_head_is_the_layer_that_makes_the_outputs(which):
    network = built(which)
    head = network.get_submodule(SMALL[which][0].head(network))
    seen = []
    handle = head.register_forward_hook(lambda _, inputs, output: seen.append(output))
    with torch.no_grad():
        logits = network(samples(which, 2))
    handle.remove()
    assert len(seen) == 1
    assert seen[0] is logits


@each
def test_nothing_but_parameters_is_learned_and_training_mode_changes_nothing(which):
    network = built(which)
    check_network(network, samples(which, 2))
    assert not list(network.buffers())
    assert not any(getattr(layer, "inplace", False) for layer in network.modules())
    x = samples(which, 2)
    with torch.no_grad():
        trained = network.train()(x)
        torch.testing.assert_close(network.eval()(x), trained, rtol=0, atol=0)
    network.train()


@pytest.mark.parametrize("model", [TwoCNN(), LeNet(), ResNet20(), ResNet18(), MobileNet(), VGG()])
@pytest.mark.parametrize("shape", [(13,), (28, 28), (0, 28, 28), (2, 1, 28, 28)])
def test_image_models_refuse_what_is_no_image(model, shape):
    with pytest.raises(OptionError) as refused:
        model.network(shape, 2)
    assert str(refused.value) == (
        f"model {model.name} needs images [C, H, W]; the data has shape {shape}; choose --model mlp"
    )


@pytest.mark.parametrize(
    ("model", "smallest"),
    [
        (TwoCNN(), 4),
        (LeNet(), 12),
        (ResNet20(), 8),
        (ResNet18(), 8),
        (ResNet18(small_images=False), 32),
        (MobileNet(), 8),
        (VGG(), 8),
    ],
)
def test_image_models_refuse_images_one_pixel_too_small(model, smallest):
    for shape in ((1, smallest - 1, smallest), (1, smallest, smallest - 1)):
        with pytest.raises(OptionError) as refused:
            model.network(shape, 2)
        assert str(refused.value) == (
            f"model {model.name} needs images of at least {smallest}x{smallest} pixels, "
            f"the data has shape {shape}; choose --model mlp"
        )


@pytest.mark.parametrize("model", [MLP(), TwoNN()])
@pytest.mark.parametrize("shape", [(), (3, 0)])
def test_perceptrons_refuse_samples_without_inputs(model, shape):
    with pytest.raises(OptionError, match=f"model {model.name} needs at least one input"):
        model.network(shape, 2)


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (1, 28, 28)])
def test_the_stacked_lstm_refuses_what_is_no_sequence(shape):
    with pytest.raises(OptionError) as refused:
        StackedLSTM().network(shape, 80)
    assert str(refused.value) == (
        "model stacked-lstm needs sequences of characters [T]; the data has shape "
        f"{shape}; choose --data shakespeare, or another model: bfl list model"
    )


@pytest.mark.parametrize("values", [[0.0, 80.0], [-1.0, 3.0], [0.5, 1.0], [float("nan"), 1.0]])
def test_the_stacked_lstm_refuses_values_that_are_no_codes(values):
    model = StackedLSTM()
    model.check_samples(torch.tensor([[0.0, 79.0]]))
    model.check_samples(torch.empty(0, 2))
    with pytest.raises(OptionError, match="whole numbers from 0 to 79; the data has other values"):
        model.check_samples(torch.tensor([[0.0, 1.0], values]))


def test_the_depth_of_vgg_is_one_of_the_papers():
    with pytest.raises(OptionError, match=r"^model\.depth: 12 is not .*: 11, 13, 16$"):
        build(VGG, {"depth": 12}, "model")


def test_narrow_mobilenets_have_multiples_of_eight_channels():
    with torch.device("meta"):
        network = MobileNet(width=0.3).network((3, 32, 32), 10)
    widths = [layer.out_channels for layer in network.modules() if hasattr(layer, "out_channels")]
    # 9.6, 19.2, 38.4, 76.8, 153.6 and 307.2, each twice from the first depthwise layer on
    assert widths[:5] == [8, 8, 16, 16, 40]
    assert widths[-1] == 304


@pytest.mark.parametrize(
    ("model", "channels"), [(ResNet20, 16), (ResNet18, 64), (MobileNet, 8), (VGG, 64)]
)
def test_groups_must_divide_the_channels(model, channels):
    with pytest.raises(OptionError, match=r"^model\.groups: 3 is not allowed; allowed: 1, 2, 4"):
        build(model, {"groups": 3}, "model")
    with pytest.raises(OptionError, match=f"allowed: at least 1 and at most {channels}$"):
        build(model, {"groups": 2 * channels}, "model")
    assert build(model, {"groups": channels}, "model").groups == channels


def test_the_number_of_groups_reaches_every_norm():
    networks = (
        ResNet20(groups=2).network((1, 8, 8), 2),
        ResNet18(groups=2).network((1, 8, 8), 2),
        MobileNet(groups=2).network((1, 8, 8), 2),
        VGG(groups=2).network((1, 8, 8), 2),
    )
    for network, least in zip(networks, (19, 19, 27, 8), strict=True):
        norms = [m for m in network.modules() if isinstance(m, torch.nn.GroupNorm)]
        assert len(norms) >= least
        assert {norm.num_groups for norm in norms} == {2}


@pytest.mark.parametrize("values", [{"hidden": [10, 0]}, {"activation": "gelu"}, {"hidden": "9"}])
def test_the_perceptron_refuses_options_outside_their_bounds(values):
    with pytest.raises(OptionError, match=r"^model\."):
        build(MLP, values, "model")


def test_the_perceptrons_activation_is_an_option():
    for name, layer in (("relu", torch.nn.ReLU), ("tanh", torch.nn.Tanh)):
        network = build(MLP, {"hidden": [3, 2], "activation": name}, "model").network((4,), 2)
        assert isinstance(network.activation, layer)


def test_every_model_has_a_name_a_summary_and_a_reference():
    assert [model.name for model in MODELS] == [
        "mlp",
        "linear",
        "two-nn",
        "two-cnn",
        "lenet",
        "resnet20",
        "resnet18",
        "mobilenet",
        "vgg",
        "stacked-lstm",
    ]
    assert all(model.summary().endswith(".") and model.reference for model in MODELS)


def test_declaring_models_does_not_import_torch():
    code = "import sys, bflcore.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_linear_predictor_starts_at_zero_and_its_parameters_are_coefficients():
    network = Linear().network((2, 3), 4)
    assert {name: tuple(p.shape) for name, p in network.named_parameters()} == {
        "head.weight": (4, 6),
        "head.bias": (4,),
    }
    assert not any(p.any() for p in network.parameters())
    assert Linear().interpretable
    assert not MLP().interpretable
