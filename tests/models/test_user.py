"""A user's own network: found, tried, and refused in one line."""

from __future__ import annotations

import pickle
import sys

import pytest
import torch

from bflcore.errors import OptionError
from bflcore.models import load_factory
from bflcore.models.user import file_name
from bflcore.options import as_dict

SOURCE = """
import math
from pathlib import Path
from torch import nn
import torch

number = 3

def _dense(shape, outputs):
    return [nn.Flatten(), nn.Linear(math.prod(shape), 4), nn.ReLU(), nn.Linear(4, outputs)]

def build(input_shape, outputs):
    return nn.Sequential(*_dense(input_shape, outputs))

def declared(input_shape, outputs):
    network = build(input_shape, outputs)
    network.head = "1"
    return network

def misdeclared(input_shape, outputs):
    network = build(input_shape, outputs)
    network.head = "2"
    return network

class Named(nn.Module):
    def __init__(self, input_shape, outputs):
        super().__init__()
        self.head = nn.Sequential(*_dense(input_shape, outputs))
        self.unused = nn.Linear(1, 1)

    def forward(self, x):
        return self.head(x)

def linear(input_shape, outputs):
    return nn.Linear(*input_shape, outputs)

def double(input_shape, outputs):
    return build(input_shape, outputs).double()

def dropping(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(math.prod(input_shape), outputs))

def embedding(input_shape, outputs):
    return nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(12, outputs))

def raising(input_shape, outputs):
    raise ValueError("two\\nlines")

def exiting(input_shape, outputs):
    raise SystemExit("enough")

def nothing(input_shape, outputs):
    pass

def empty(input_shape, outputs):
    return nn.Flatten()

def running(input_shape, outputs):
    return nn.Sequential(*_dense(input_shape, outputs), nn.BatchNorm1d(outputs))

def narrow(input_shape, outputs):
    return build(input_shape, 1)

def tuples(input_shape, outputs):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x, x
    return Pair()

def misfit(input_shape, outputs):
    return nn.Sequential(nn.Linear(99, outputs))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in a folder that holds the module `mynets`; forget it afterwards."""
    tmp_path.joinpath("mynets.py").write_text(SOURCE)
    tmp_path.joinpath("broken.py").write_text("import mynets\n\n1 / 0\n")
    tmp_path.joinpath("needy.py").write_text("import surely_not_installed\n")
    tmp_path.joinpath("leaving.py").write_text("import sys\n\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in {"mynets", "broken", "needy", "leaving"}:
            del sys.modules[name]


def refusal(work):
    with pytest.raises(OptionError) as refused:
        work()
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_a_factory_in_the_current_folder_builds_the_network():
    network = load_factory("mynets:build").network((2, 3), 5)
    assert network(torch.zeros(7, 2, 3)).shape == (7, 5)


def test_the_folder_is_put_on_the_path_once(folder):
    load_factory("mynets:build")
    load_factory("mynets:declared")
    assert sys.path.count(str(folder)) == 1


def test_a_factory_in_an_installed_package_is_found():
    model = load_factory("bflcore.models.networks:last_linear")
    assert model.name == "bflcore.models.networks:last_linear"


def test_the_head_defaults_to_the_last_linear_layer():
    model = load_factory("mynets:build")
    assert model.head(model.network((4,), 2)) == "3"


@pytest.mark.parametrize(("factory", "head"), [("declared", "1"), ("Named", "head")])
def test_a_network_declares_its_head_by_path_or_by_name(factory, head):
    model = load_factory(f"mynets:{factory}")
    assert model.head(model.network((4,), 2)) == head


def test_a_declared_head_must_be_a_layer_with_parameters():
    model = load_factory("mynets:misdeclared")
    message = refusal(lambda: model.head(model.network((4,), 2)))
    assert "declares the head '2'" in message
    assert "allowed: 1, 3" in message


def test_a_bare_linear_layer_gets_a_head_with_a_path():
    model = load_factory("mynets:linear")
    network = model.network((4,), 2)
    head = model.head(network)
    assert {f"{head}.weight", f"{head}.bias"} == set(dict(network.named_parameters()))


def test_the_trial_run_follows_the_networks_precision():
    network = load_factory("mynets:double").network((4,), 2)
    assert {p.dtype for p in network.parameters()} == {torch.float64}


def test_the_trial_run_leaves_the_global_generator_as_it_was():
    model = load_factory("mynets:dropping")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.factory((4,), 2)
        expected = torch.get_rng_state()
        torch.manual_seed(0)
        network = model.network((4,), 2)
        assert torch.equal(torch.get_rng_state(), expected)
    assert network.training


def test_a_user_model_is_stored_by_name_and_survives_pickling():
    model = load_factory("mynets:build")
    copy = pickle.loads(pickle.dumps(model))
    assert as_dict(model) == as_dict(copy) == {"name": "mynets:build"}
    assert copy.network((4,), 2)(torch.zeros(1, 4)).shape == (1, 2)


@pytest.mark.parametrize("spec", ["mynets", "mynets:", ":build", ""])
def test_a_specification_needs_a_module_and_a_factory(spec):
    message = refusal(lambda: load_factory(spec))
    assert f"model {spec!r} is not allowed; allowed: module:factory" in message


@pytest.mark.parametrize(
    ("spec", "missing"),
    [("mynest:build", "mynest"), ("absent.nets:build", "absent")],
)
def test_a_missing_module_is_named_with_the_folder_searched(spec, missing, folder):
    message = refusal(lambda: load_factory(spec))
    assert f"model {spec}: there is no module {missing} in {folder} or among" in message


@pytest.mark.parametrize(
    ("module", "cause"),
    [
        ("broken", "ZeroDivisionError: division by zero"),
        ("needy", "ModuleNotFoundError: No module named 'surely_not_installed'"),
        ("leaving", "SystemExit: 3"),
    ],
)
def test_a_module_that_cannot_be_imported_gives_the_cause(module, cause):
    message = refusal(lambda: load_factory(f"{module}:build"))
    assert f"model {module}:build: importing {module} failed: {cause};" in message


def test_a_missing_factory_is_answered_with_the_nearest_and_the_modules_own():
    message = refusal(lambda: load_factory("mynets:biuld"))
    assert "has no 'biuld' (did you mean build?)" in message
    assert "allowed: Named, build," in message
    assert "Path" not in message
    assert "_dense" not in message


def test_a_factory_must_be_callable():
    message = refusal(lambda: load_factory("mynets:number"))
    assert "number is int, not callable" in message


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("raising", "failed for input_shape=(4,), outputs=2: ValueError: two lines;"),
        ("exiting", "failed for input_shape=(4,), outputs=2: SystemExit: enough;"),
        ("nothing", "returned NoneType; allowed: a torch.nn.Module"),
        ("empty", "has no parameters to learn"),
        ("narrow", "returned (2, 1) for 2 samples of shape (4,); allowed: (2, 2)"),
        ("tuples", "returned tuple for 2 samples of shape (4,); allowed: (2, 2)"),
        ("misfit", "cannot run on samples of shape (2, 4): RuntimeError: mat1 and mat2"),
    ],
)
def test_a_factory_that_makes_no_fitting_network_gives_the_cause(factory, reason):
    message = refusal(lambda: load_factory(f"mynets:{factory}").network((4,), 2))
    assert message.startswith(f"model mynets:{factory} {reason}")


def test_a_module_can_be_given_by_its_path_which_is_stored_whole(folder, monkeypatch):
    (folder / "sub").mkdir()
    (folder / "sub" / "pathnets.py").write_text(SOURCE)
    model = load_factory("sub/pathnets.py:build")
    assert model.name == f"{folder}/sub/pathnets.py:build"
    assert model.source == folder / "sub" / "pathnets.py"
    monkeypatch.chdir("/")
    assert load_factory(model.name).network((4,), 2)(torch.zeros(1, 4)).shape == (1, 2)
    assert pickle.loads(pickle.dumps(model)).name == model.name
    sys.path.remove(str(folder / "sub"))
    monkeypatch.delitem(sys.modules, "pathnets")


def test_a_path_that_is_not_there_or_has_a_name_that_is_taken_is_refused(folder):
    message = refusal(lambda: load_factory("./absent.py:build"))
    assert "absent.py is not a file, and no module absent is installed" in message
    assert load_factory("/gone/mynets.py:build").network((4,), 2)(torch.zeros(1, 4)).shape == (1, 2)
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "torch.py").write_text(SOURCE)
    message = refusal(lambda: load_factory("sub/torch.py:build"))
    assert "another module named torch is installed" in message
    sys.path.remove(str(folder / "sub"))


def test_the_copy_that_a_run_keeps_takes_precedence(folder):
    kept = folder / "kept"
    kept.mkdir()
    assert [file_name(s) for s in ("mynets:build", "a.nets:b", "/x/nets.py:b")] == [
        *("mynets.py", "nets.py", "nets.py")
    ]
    (kept / "mynets.py").write_text(
        SOURCE.replace("shape), 4)", "shape), 9)").replace("(4, o", "(9, o")
    )
    network = load_factory("mynets:build", kept).network((4,), 2)
    assert network[1].out_features == 9
    assert load_factory("mynets:build").network((4,), 2)[1].out_features == 4
    assert load_factory("mynets:build", folder / "none").network((4,), 2)[1].out_features == 4
    (kept / "mynets.py").write_text("1 / 0")
    message = refusal(lambda: load_factory("mynets:build", kept))
    assert "mynets.py failed: ZeroDivisionError" in message


def test_a_network_that_looks_samples_up_is_advised_to_convert_them():
    message = refusal(lambda: load_factory("mynets:embedding").network((4,), 2))
    assert message.endswith("samples arrive as real numbers, even codes: look them up as x.long()")
