"""The built-in models: their options and the input shapes that they accept."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING

from bflcore.errors import OptionError
from bflcore.lazy import lazy
from bflcore.models.base import Model
from bflcore.options import component, option

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bflcore.models import networks, recurrent
else:
    networks = lazy("bflcore.models.networks")
    recurrent = lazy("bflcore.models.recurrent")

__all__ = [
    "MLP",
    "MODELS",
    "VGG",
    "LeNet",
    "Linear",
    "MobileNet",
    "ResNet18",
    "ResNet20",
    "StackedLSTM",
    "TwoCNN",
    "TwoNN",
]

# torchvision's stem divides each side by 4 before the first residual block; smaller images would
# shrink too much, so they get the stem of the CIFAR networks.
SMALL_IMAGE = 64
DEPTHS = (11, 13, 16)  # of VGG


@component
class MLP(Model):
    """Multilayer perceptron on flattened inputs."""

    name = "mlp"
    reference = "Rumelhart, Hinton and Williams 1986"
    hidden: tuple[int, ...] = option((100,), "widths of the hidden layers, in order", at_least=1)
    activation: str = option("relu", "nonlinearity between layers", choices=("relu", "tanh"))

    def network(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the perceptron for samples of any shape."""
        inputs = _flattened(self.name, input_shape)
        return networks.Perceptron(inputs, self.hidden, outputs, self.activation)


@component
class Linear(Model):
    """Linear predictor: one weight per feature and output, and an intercept."""

    name = "linear"
    reference = "Nelder and Wedderburn 1972"
    interpretable = True
    expected_failures = MappingProxyType({"has a head": "the whole network decides"})

    def network(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the predictor with all weights 0."""
        inputs = _flattened(self.name, input_shape)
        network = networks.Perceptron(inputs, (), outputs)
        for parameter in network.parameters():
            parameter.data.zero_()
        return network


@component
class TwoNN(Model):
    """Perceptron with two hidden layers of 200 (2NN)."""

    name = "two-nn"
    reference = "McMahan et al. 2017, section 3"

    def network(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the perceptron for samples of any shape; 199,210 parameters on MNIST."""
        inputs = _flattened(self.name, input_shape)
        return networks.Perceptron(inputs, (200, 200), outputs, "relu")


@component
class TwoCNN(Model):
    """Two 5x5 convolutions with pooling and a dense layer of 512."""

    name = "two-cnn"
    reference = "McMahan et al. 2017, section 3"

    def network(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the network for images ``[C, H, W]``; 1,663,370 parameters on MNIST."""
        # Two poolings shrink four pixels to one.
        return networks.TwoCNN(*_image(self.name, input_shape, at_least=4), outputs)


@component
class LeNet(Model):
    """LeNet-5 with rectified units and max pooling."""

    name = "lenet"
    reference = "LeCun et al. 1998, section II.B"

    def network(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the network for images ``[C, H, W]``; images below 32 pixels are padded by 2."""
        # Padded by 2, twelve pixels are 12 -> 6 -> 2 -> 1 through the two convolutions.
        return networks.LeNet(*_image(self.name, input_shape, at_least=12), outputs)


@component
class ResNet20(Model):
    """Residual network of 20 layers for small images, with group norm."""

    name = "resnet20"
    reference = "He et al. 2016, section 4.2; group norm: Wu and He 2018"
    norm: str = option(
        "group",
        "normalisation",
        choices=("group", "none"),
    )
    groups: int = option(
        8, "number of groups in group norm (a divisor of 16)", at_least=1, at_most=16
    )

    def __attrs_post_init__(self) -> None:
        _divides(self.groups, 16)

    def network(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the network for images ``[C, H, W]``; 269,722 parameters on CIFAR-10."""
        # Two strides leave a quarter of each side: 2x2 pixels of the smallest image.
        channels, _, _ = _image(self.name, input_shape, at_least=8)
        return networks.ResNet20(channels, outputs, self.norm, self.groups)


@component
class ResNet18(Model):
    """Residual network of 18 layers from torchvision, with group norm."""

    name = "resnet18"
    reference = "He et al. 2016, table 1; group norm: Wu and He 2018"
    groups: int = option(
        32, "number of groups in group norm (a divisor of 64)", at_least=1, at_most=64
    )
    small_images: bool = option(
        True, f"3x3 stem without pooling for images below {SMALL_IMAGE} pixels"
    )

    def __attrs_post_init__(self) -> None:
        _divides(self.groups, 64)

    def network(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the network for images ``[C, H, W]``; 11,173,962 parameters on CIFAR-10."""
        # One pixel must remain after three strides with the small stem, or five without it.
        channels, *sides = _image(self.name, input_shape, at_least=8 if self.small_images else 32)
        small = self.small_images and min(sides) < SMALL_IMAGE
        return networks.resnet18(channels, outputs, self.groups, small)


@component
class MobileNet(Model):
    """Depthwise separable convolutions, with group norm (MobileNet, version 1)."""

    name = "mobilenet"
    reference = "Howard et al. 2017, table 1; group norm: Wu and He 2018"
    width: float = option(
        1.0, "width multiplier (channels are rounded to multiples of 8)", above=0, at_most=4
    )
    norm: str = option("group", "normalisation", choices=("group", "none"))
    groups: int = option(
        8, "number of groups in group norm (a divisor of 8)", at_least=1, at_most=8
    )
    small_images: bool = option(
        True, f"first convolution without stride for images below {SMALL_IMAGE} pixels"
    )

    def __attrs_post_init__(self) -> None:
        _divides(self.groups, 8)

    def network(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the network for images ``[C, H, W]``; 3,216,650 parameters on CIFAR-10."""
        # Three of the four or five strides leave one pixel of the smallest image.
        channels, *sides = _image(self.name, input_shape, at_least=8)
        small = self.small_images and min(sides) < SMALL_IMAGE
        return networks.MobileNet(channels, outputs, self.width, self.norm, self.groups, small)


@component
class VGG(Model):
    """Stages of 3x3 convolutions and pooling, with group norm and one linear layer."""

    name = "vgg"
    reference = "Simonyan and Zisserman 2015, table 1; group norm: Wu and He 2018"
    depth: int = option(11, "number of layers in the paper (11, 13 or 16)", at_least=11, at_most=16)
    norm: str = option("group", "normalisation", choices=("group", "none"))
    groups: int = option(
        32, "number of groups in group norm (a divisor of 64)", at_least=1, at_most=64
    )

    def __attrs_post_init__(self) -> None:
        if self.depth not in DEPTHS:
            allowed = ", ".join(map(str, DEPTHS))
            raise OptionError(f"depth: {self.depth} is not allowed; allowed: {allowed}")
        _divides(self.groups, 64)

    def network(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the network for images ``[C, H, W]``; 9,228,362 parameters on CIFAR-10."""
        # Three of the five poolings leave one pixel of the smallest image.
        channels, _, _ = _image(self.name, input_shape, at_least=8)
        return networks.VGG(channels, outputs, self.depth, self.norm, self.groups)


@component
class StackedLSTM(Model):
    """LEAF's language model: an embedding of characters, layers of LSTM, a linear head."""

    name = "stacked-lstm"
    reference = "Caldas et al. 2018 (LEAF), after McMahan et al. 2017, section 3"
    characters: int = option(80, "size of the vocabulary (LEAF's has 80 characters)", at_least=2)
    embedding: int = option(8, "dimensions of the embedding", at_least=1)
    hidden: int = option(256, "units per layer", at_least=1)
    layers: int = option(2, "number of LSTM layers", at_least=1)

    def network(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the network for sequences ``[T]``; 817,872 parameters on Shakespeare."""
        if len(input_shape) != 1 or input_shape[0] < 1:
            raise OptionError(
                f"model {self.name} needs sequences of characters [T]; the data has shape "
                f"{input_shape}; choose --data shakespeare, or another model: bfl list model"
            )
        return recurrent.StackedLSTM(
            self.characters, self.embedding, self.hidden, self.layers, outputs
        )

    def check_samples(self, x: Tensor) -> None:
        """Raise `OptionError` unless all of `x` ``[N, T]`` are codes 0..characters-1."""
        if len(x) and not ((x >= 0) & (x < self.characters) & (x == x.floor())).all():
            raise OptionError(
                f"model {self.name} reads character codes, whole numbers from 0 to "
                f"{self.characters - 1}; the data has other values between {x.min():g} and "
                f"{x.max():g}; choose --data shakespeare, raise model.characters, or choose "
                "--model mlp"
            )


MODELS: tuple[type[Model], ...] = (
    MLP,
    Linear,
    TwoNN,
    TwoCNN,
    LeNet,
    ResNet20,
    ResNet18,
    MobileNet,
    VGG,
    StackedLSTM,
)


def _flattened(model: str, shape: tuple[int, ...]) -> int:
    """Return the number of inputs per sample of `shape`. Raises `OptionError` if it is 0."""
    if not shape or math.prod(shape) == 0:
        raise OptionError(
            f"model {model} needs at least one input per sample; the data has shape {shape}; "
            "give x as [N, F], one row per sample"
        )
    return math.prod(shape)


def _image(model: str, shape: tuple[int, ...], *, at_least: int) -> tuple[int, int, int]:
    """Return channels, height and width. Raises `OptionError` if it is not a large enough image."""
    if len(shape) != 3 or shape[0] < 1:
        raise OptionError(
            f"model {model} needs images [C, H, W]; the data has shape {shape}; choose --model mlp"
        )
    channels, height, width = shape
    if min(height, width) < at_least:
        raise OptionError(
            f"model {model} needs images of at least {at_least}x{at_least} pixels, "
            f"the data has shape {shape}; choose --model mlp"
        )
    return channels, height, width


def _divides(groups: int, channels: int) -> None:
    """Raise `OptionError` unless each group gets the same number of channels."""
    if channels % groups:
        allowed = ", ".join(str(g) for g in range(1, channels + 1) if channels % g == 0)
        raise OptionError(
            f"groups: {groups} is not allowed; allowed: {allowed} (divisors of {channels})"
        )
