"""What every model inherits."""

import pytest
from torch import nn

from bflcore import Model, component


@component
class Two(Model):
    """Two linear layers."""

    name = "two"

    def network(self, input_shape, outputs):
        return nn.Sequential(nn.Linear(*input_shape, 5), nn.ReLU(), nn.Linear(5, outputs))


def test_the_head_is_the_last_linear_layer_unless_the_model_says_otherwise():
    @component
    class Unusual(Two):
        """Share the last layer."""

        name = "unusual"

        def head(self, network):
            return "0"

    network = Two().network((3,), 2)
    assert Two().head(network) == "2"
    assert Unusual().head(network) == "0"


def test_a_model_without_a_network_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Model()
