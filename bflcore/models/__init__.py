"""Models: the built-in networks, and networks that users bring."""

from __future__ import annotations

from bflcore.models.base import Model
from bflcore.models.user import UserModel, load_factory
from bflcore.models.zoo import (
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

__all__ = [
    "MLP",
    "MODELS",
    "VGG",
    "LeNet",
    "Linear",
    "MobileNet",
    "Model",
    "ResNet18",
    "ResNet20",
    "StackedLSTM",
    "TwoCNN",
    "TwoNN",
    "UserModel",
    "load_factory",
]
