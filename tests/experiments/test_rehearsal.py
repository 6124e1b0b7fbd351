"""A network of the user's own that cannot be trained is refused before a run writes anything."""

import importlib
import sys

import pytest
import torch

import bflcore
from bflcore.errors import OptionError

NETS = """
import torch
from torch import nn

class Detached(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.head = nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.head(x).detach()

class Tied(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.second = nn.Linear(inputs, inputs), nn.Linear(inputs, inputs)
        self.second.weight = self.first.weight
        self.head = nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

class Recurrent(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.cells = nn.LSTM(2, 4, batch_first=True)
        self.head = nn.Linear(4, outputs)

    def forward(self, x):
        return self.head(self.cells(x.unflatten(1, (-1, 2)))[0][:, -1])

class Codes(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.table = nn.Embedding(2, 3)
        self.head = nn.Linear(3 * inputs, outputs)

    def forward(self, x):
        return self.head(self.table(x.long() * 0 + self.code).flatten(1))

    code = 0

class Beyond(Codes):
    code = 5  # only where samples are not all zero

    def forward(self, x):
        return self.head(self.table((x != 0).long() * self.code).flatten(1))

def detached(shape, outputs): return Detached(*shape, outputs)
def tied(shape, outputs): return Tied(*shape, outputs)
def recurrent(shape, outputs): return Recurrent(*shape, outputs)
def codes(shape, outputs): return Codes(*shape, outputs)
def beyond(shape, outputs): return Beyond(*shape, outputs)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "rehearsednets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rehearsednets", raising=False)

    def run(method, factory, **flags):
        return bflcore.run(
            method,
            data="synthetic",
            partition="natural",
            clients=2,
            rounds=1,
            workers=1,
            model=f"rehearsednets:{factory}",
            out=tmp_path / "run",
            options={"dataset.features": 6, "dataset.samples": 12, "dataset.classes": 3},
            **flags,
        )

    return run


def test_a_network_without_gradients_is_refused_by_name_and_nothing_is_written(own, tmp_path):
    with pytest.raises(OptionError) as caught:
        own("fedavg", "detached")
    message = str(caught.value)
    assert message.startswith("--model: inference map cannot train rehearsednets:detached: ")
    assert "RuntimeError: element 0 of tensors does not require grad" in message
    assert not (tmp_path / "run").exists()


def test_an_error_in_the_network_is_told_with_the_file_and_line_of_the_network(own, tmp_path):
    line = 1 + NETS.splitlines().index(
        "        return self.head(self.table((x != 0).long() * self.code).flatten(1))"
    )
    with pytest.raises(OptionError, match=f"IndexError: .* at .*/rehearsednets.py:{line}"):
        own("fedavg", "beyond")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("factory", ["tied", "recurrent", "codes"])
@pytest.mark.parametrize("method", ["fedavg", "fedvi", "bpfed", "fedsi", "superfed-mm"])
def test_tied_recurrent_and_looked_up_weights_are_trained(own, method, factory):
    flags = {"cohort": 2} if method.startswith("superfed") else {}
    summary = own(method, factory, **flags).summary
    assert summary["dropped"] == []


def test_a_run_is_loaded_without_the_module_of_its_network(own, tmp_path, monkeypatch):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).numpy()
    before = own("fedvi", "tied").server.predict(x).probabilities
    (tmp_path / "rehearsednets.py").rename(tmp_path / "gone.txt")
    monkeypatch.delitem(sys.modules, "rehearsednets")
    monkeypatch.chdir("/")
    run = bflcore.load(tmp_path / "run")
    assert (run.server.predict(x).probabilities == before).all()
    assert (tmp_path / "run" / "model" / "rehearsednets.py").read_text() == NETS


def test_a_run_whose_network_is_gone_is_resumed_with_the_copy(own, bfl, tmp_path, monkeypatch):
    own("fedavg", "tied")
    (tmp_path / "rehearsednets.py").unlink()
    monkeypatch.delitem(sys.modules, "rehearsednets")
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    status, out, err = bfl("resume", "run")
    assert (status, err) == (0, "")
    assert "run is finished (1 rounds)" in out
