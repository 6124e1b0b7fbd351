"""Models: networks that declare their head, and how a user brings one of their own."""

from __future__ import annotations

from bflcore.models.base import Model
from bflcore.models.parts import MLP, MODELS, LeNet, ResNet18, ResNet20, TwoCNN, TwoNN
from bflcore.models.user import UserModel, load_factory

__all__ = [
    "MLP",
    "MODELS",
    "LeNet",
    "Model",
    "ResNet18",
    "ResNet20",
    "TwoCNN",
    "TwoNN",
    "UserModel",
    "load_factory",
]
