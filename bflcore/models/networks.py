"""The networks: plain modules whose only state is their parameters.

Every forward pass depends on the parameters and the samples alone, so that
`torch.func.functional_call` under `torch.vmap` can run many networks at once: it changes nothing in
place, does not branch on values, and keeps no running statistics. Layers have PyTorch's default
initialisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from bflcore.errors import OptionError, described

__all__ = [
    "VGG",
    "LeNet",
    "MobileNet",
    "Perceptron",
    "ResNet20",
    "TwoCNN",
    "check_network",
    "last_linear",
    "normalisation",
    "resnet18",
    "unbatchable",
]

# Names of the running statistics in PyTorch's normalisation layers.
RUNNING = frozenset({"running_mean", "running_var", "num_batches_tracked"})
# Layers that normalise by statistics of the batch.
BATCH = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - the base class of all of them


class Perceptron(nn.Module):
    """Dense layers on flattened samples: ``[B, ...]`` -> ``[B, outputs]``."""

    def __init__(
        self, inputs: int, hidden: Sequence[int], outputs: int, activation: str = "relu"
    ) -> None:
        super().__init__()
        widths = (inputs, *hidden)
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.activation = nn.Tanh() if activation == "tanh" else nn.ReLU()
        self.head = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[B, outputs]``."""
        x = x.flatten(1)
        for layer in self.hidden:
            x = self.activation(layer(x))
        logits: Tensor = self.head(x)
        return logits


class TwoCNN(nn.Module):
    """The convolutional network of federated averaging: ``[B, C, H, W]`` -> ``[B, outputs]``.

    Two 5x5 convolutions of 32 and 64 channels that keep the size, each followed by 2x2 max
    pooling, and a dense layer of 512. Reference: McMahan et al. 2017, section 3.
    """

    def __init__(self, channels: int, height: int, width: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.dense = nn.Linear(64 * (height // 4) * (width // 4), 512)
        self.head = nn.Linear(512, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[B, outputs]``."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        logits: Tensor = self.head(functional.relu(self.dense(x.flatten(1))))
        return logits


class LeNet(nn.Module):
    """LeNet-5: ``[B, C, H, W]`` -> ``[B, outputs]``.

    Two 5x5 convolutions of 6 and 16 channels, each followed by 2x2 max pooling, and dense layers
    of 120 and 84. Images below 32 pixels are padded by 2, as the 28x28 digits were.
    Reference: LeCun et al. 1998, section II.B, with rectified units and max pooling instead of
    sigmoids and subsampling.
    """

    def __init__(self, channels: int, height: int, width: int, outputs: int) -> None:
        super().__init__()
        padding = 2 if min(height, width) < 32 else 0
        rows, columns = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width))
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.dense1 = nn.Linear(16 * rows * columns, 120)
        self.dense2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[B, outputs]``."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.dense1(x.flatten(1)))
        logits: Tensor = self.head(functional.relu(self.dense2(x)))
        return logits


class Residual(nn.Module):
    """Two 3x3 convolutions with a shortcut: ``[B, inputs, H, W]`` -> ``[B, outputs, H', W']``.

    If the number of channels grows, height and width halve and the shortcut fills the new channels
    with zeros (option A of He et al. 2016, section 3.3), which does not need parameters.
    """

    def __init__(self, inputs: int, outputs: int, norm: str, groups: int) -> None:
        super().__init__()
        self.grown = outputs - inputs
        stride, bias = 2 if self.grown else 1, norm == "none"
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias)
        self.norm1 = normalisation(norm, groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=bias)
        self.norm2 = normalisation(norm, groups, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the rectified sum of both branches."""
        branch = functional.relu(self.norm1(self.conv1(x)))
        branch = self.norm2(self.conv2(branch))
        return functional.relu(self._shortcut(x) + branch)

    def _shortcut(self, x: Tensor) -> Tensor:
        if not self.grown:
            return x
        before = self.grown // 2
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, before, self.grown - before))


class ResNet20(nn.Module):
    """The 20-layer residual network for small images: ``[B, C, H, W]`` -> ``[B, outputs]``.

    Three stages of three blocks with 16, 32 and 64 channels, then the mean over the image.
    Reference: He et al. 2016, section 4.2 (n = 3).
    """

    def __init__(self, channels: int, outputs: int, norm: str = "group", groups: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=norm == "none")
        self.norm = normalisation(norm, groups, 16)
        widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
        blocks = (Residual(*pair, norm, groups) for pair in pairwise(widths))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(64, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[B, outputs]``."""
        x = self.blocks(functional.relu(self.norm(self.conv(x))))
        logits: Tensor = self.head(x.mean((-2, -1)))
        return logits


class Separable(nn.Module):
    """A 3x3 convolution of each channel, then a 1x1 convolution: ``[B, inputs, H, W]`` -> the same.

    Both are normalised and rectified. Reference: Howard et al. 2017, figure 3.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str, groups: int) -> None:
        super().__init__()
        bias = norm == "none"
        self.depthwise = nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=bias)
        self.norm1 = normalisation(norm, groups, inputs)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=bias)
        self.norm2 = normalisation(norm, groups, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, outputs, H', W']``; a stride of 2 halves height and width."""
        x = functional.relu(self.norm1(self.depthwise(x)))
        return functional.relu(self.norm2(self.pointwise(x)))


class MobileNet(nn.Module):
    """MobileNet: ``[B, C, H, W]`` -> ``[B, outputs]``.

    A 3x3 convolution, 13 separable ones, then the mean over the image. `width` multiplies all
    numbers of channels, which are rounded to multiples of 8. `small` leaves out the stride of the
    first convolution. Reference: Howard et al. 2017, table 1 and section 3.3.
    """

    # Channels and stride of each separable convolution.
    BLOCKS = (
        *((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)),
        *((512, 1),) * 5,
        *((1024, 2), (1024, 1)),
    )

    def __init__(
        self, channels: int, outputs: int, width: float, norm: str, groups: int, small: bool
    ) -> None:
        super().__init__()
        widths = [max(8, 8 * round(width * c / 8)) for c in (32, *(c for c, _ in self.BLOCKS))]
        self.conv = nn.Conv2d(
            channels, widths[0], 3, 1 if small else 2, padding=1, bias=norm == "none"
        )
        self.norm = normalisation(norm, groups, widths[0])
        strides = (stride for _, stride in self.BLOCKS)
        pairs = zip(pairwise(widths), strides, strict=True)
        self.blocks = nn.Sequential(*(Separable(*pair, s, norm, groups) for pair, s in pairs))
        self.head = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[B, outputs]``."""
        x = self.blocks(functional.relu(self.norm(self.conv(x))))
        logits: Tensor = self.head(x.mean((-2, -1)))
        return logits


class VGG(nn.Module):
    """VGG: ``[B, C, H, W]`` -> ``[B, outputs]``.

    Five stages of 3x3 convolutions with 64, 128, 256, 512 and 512 channels, each stage followed by
    2x2 max pooling that keeps the rest of an odd side, so that 28, 32 and 64 pixels leave 1, 1 and
    2. One linear layer on the mean over the image replaces the paper's three dense layers, which
    hold 90 % of its parameters and are made for 224 pixels.
    Reference: Simonyan and Zisserman 2015, table 1 (A, B and D).
    """

    # Convolutions per stage, by depth: with three dense layers, 11, 13 and 16 layers.
    STAGES: ClassVar[dict[int, tuple[int, ...]]] = {
        11: (1, 1, 2, 2, 2),
        13: (2, 2, 2, 2, 2),
        16: (2, 2, 3, 3, 3),
    }

    def __init__(self, channels: int, outputs: int, depth: int, norm: str, groups: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, count in zip((64, 128, 256, 512, 512), self.STAGES[depth], strict=True):
            for _ in range(count):
                layers.append(nn.Conv2d(channels, width, 3, padding=1, bias=norm == "none"))
                layers += [normalisation(norm, groups, width), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[B, outputs]``."""
        logits: Tensor = self.head(self.features(x).mean((-2, -1)))
        return logits


def normalisation(norm: str, groups: int, channels: int) -> nn.Module:
    """Return a normalisation layer: ``group`` or ``none``."""
    return nn.Identity() if norm == "none" else nn.GroupNorm(groups, channels)


def resnet18(channels: int, outputs: int, groups: int, small: bool) -> nn.Module:
    """Build torchvision's ResNet-18 with group norm: ``[B, C, H, W]`` -> ``[B, outputs]``.

    `small` replaces the 7x7 stem with stride and pooling by a 3x3 convolution, as in networks for
    CIFAR. All layers, including a new stem, are initialised as in torchvision.
    """
    from bflcore.data.torchvision_import import torchvision

    network: nn.Module = torchvision().models.resnet18(
        num_classes=outputs, norm_layer=partial(nn.GroupNorm, groups)
    )
    if small or channels != 3:
        size, stride = (3, 1) if small else (7, 2)
        stem = nn.Conv2d(channels, 64, size, stride, padding=size // 2, bias=False)
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
        network.conv1 = stem
    if small:
        network.maxpool = nn.Identity()
    for module in network.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # hooks may keep the output of the layer before it
    return network


def last_linear(network: nn.Module) -> str:
    """Return the module path of the last linear layer, in the order of registration.

    Raises `OptionError` if the network does not contain a linear layer.
    """
    paths: list[str] = [
        path for path, module in network.named_modules() if isinstance(module, nn.Linear)
    ]
    if not paths or not paths[-1]:
        raise OptionError(
            f"network {type(network).__name__} contains no linear layer that could be its head; "
            "declare the head: set the attribute head to the module path of the decision layer"
        )
    return paths[-1]


def check_network(network: nn.Module, samples: Tensor) -> None:
    """Raise `OptionError` unless each output depends on the parameters and its own sample alone.

    The network is tested on `samples` ``[2, ...]``. Running statistics are neither parameters nor
    constants: posteriors do not cover them, and they leak from one client to the next. Random
    numbers in the forward pass come from torch's global generator, which the run's seed does not
    determine. A network that mixes the samples of a batch would read the padding of ragged cohorts.
    """
    name = f"network {type(network).__name__}"
    if where := _first(network, _keeps_statistics):
        raise OptionError(
            f"{name} has running statistics in {where}, which posteriors do not cover; use "
            "nn.GroupNorm instead"
        )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        try:
            outputs = network(samples)
        except Exception as error:
            raise OptionError(
                f"{name} cannot run on the first samples: {described(error, network)}"
            ) from error
        drew = not torch.equal(before, torch.get_rng_state())
        others = outputs if drew else network(samples[[0, 0]])  # sample 0 twice, without sample 1
    if drew:
        where = _first(network, _drops)
        raise OptionError(
            f"{name} draws random numbers when it predicts{f' in {where}' if where else ''}, so "
            "runs would not be reproducible; remove it (--inference mc-dropout adds dropout that "
            "is drawn from the run's seed)"
        )
    if not torch.allclose(outputs[0], others[0], rtol=1e-3, atol=1e-4, equal_nan=True):
        where = _first(network, lambda module: isinstance(module, BATCH))
        raise OptionError(
            f"{name}: its output for a sample depends on the other samples of the batch"
            f"{f' through {where}' if where else ''}; use nn.GroupNorm or nn.LayerNorm, which "
            "normalise each sample by itself"
        )


def unbatchable(network: nn.Module, samples: Tensor) -> str:
    """Say where and why `torch.func.vmap` cannot run several networks at once; "" if it can.

    The network is tried on `samples` ``[B, ...]``, as two clients with the same parameters. Code
    that reads the value of a tensor, as ``.item()`` and ``if`` do, and some changes in place cannot
    be batched.
    """
    parameters = {name: torch.stack([one.detach()] * 2) for name, one in network.named_parameters()}
    entered: list[str] = []  # the modules that are running, innermost last

    def leave(*_: object) -> None:
        entered.pop()

    handles = []
    for path, module in network.named_modules():
        enter = partial(lambda where, *_: entered.append(where), _describe(path, module))
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.func.vmap(partial(torch.func.functional_call, network))(
                parameters, torch.stack([samples] * 2)
            )
    except Exception as error:  # noqa: BLE001 - a network may raise anything
        why = f"{type(error).__name__}: {error}".partition("\n")[0].partition(". ")[0]
        where = entered[-1] if entered else type(network).__name__
        return f"{where} fails under torch.func.vmap ({why})"
    finally:
        for handle in handles:
            handle.remove()
    return ""


def _describe(path: str, module: nn.Module) -> str:
    name = type(module).__name__
    return f"layer {path} ({name})" if path else name


def _first(network: nn.Module, found: Callable[[nn.Module], bool]) -> str:
    """Return the path and type of the first module that `found` accepts, or an empty string."""
    for path, module in network.named_modules():
        if found(module):
            return _describe(path, module)
    return ""


def _keeps_statistics(module: nn.Module) -> bool:
    return any(name in RUNNING for name, _ in module.named_buffers(recurse=False))


def _drops(module: nn.Module) -> bool:
    rate = getattr(module, "p", None) or getattr(module, "dropout", None)
    return isinstance(module, nn.RReLU) or (isinstance(rate, float) and rate > 0)
