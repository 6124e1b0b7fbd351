"""Torchvision beside a torch without its operators."""

import torch

from bflcore.data.torchvision_import import torchvision


def test_torchvision_imports_beside_a_cpu_torch_and_its_models_run():
    network = torchvision().models.resnet18().eval()
    with torch.no_grad():
        assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)
