"""What a run notes about its surroundings, to be compared when it is resumed."""

import hashlib
import json

import attrs
import pytest
import torch

from bflcore import __version__
from bflcore.errors import RunError
from bflcore.experiments.environment import (
    check_settings,
    environment,
    settings_digest,
    used_distributions,
)
from bflcore.experiments.integrity import write_json
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.registry import builtin
from bflcore.registry.loading import load_registry, read_plugins

FLAGS = {
    "data": {"data": "synthetic", "partition": "natural", "clients": 2},
    "dataset": {"owners": 2, "samples": 10},
}


def prepared(**flags):
    return prepare(resolve(load_registry(), "fedavg", {}, FLAGS | flags))


def fingerprints(of):
    return environment(of, load_registry())["fingerprints"]


@pytest.fixture(scope="module")
def plain():
    return fingerprints(prepared())


def changed(plain, other):
    found = fingerprints(other)
    return {name for name in plain if plain[name] != found[name]}


def test_the_machine_is_noted_but_a_run_may_continue_on_another(plain):
    machine = environment(prepared(), load_registry())["machine"]
    assert machine.keys() == {"system", "processor", "cores"}
    assert machine["cores"] > 0
    assert not any("machine" in name for name in plain)


def test_the_same_experiment_has_the_same_fingerprints(plain):
    assert changed(plain, prepared()) == set()


def test_each_fingerprint_is_of_one_thing(plain):
    assert changed(plain, prepared(rounds=7)) == {"experiment.toml"}
    seeded = {"experiment.toml", "the data or its partition", "the initial network"}
    assert changed(plain, prepared(seed=7)) == seeded


def test_settings_that_do_not_determine_results_have_no_part_in_them(plain):
    assert changed(plain, prepared(checkpoint_every=5, engine={"workers": 1})) == set()


def test_one_sample_that_differs_changes_the_fingerprint_of_the_data(plain):
    of = prepared()
    x = of.problem.train.x.clone()
    x.view(-1)[0] += 1
    train = attrs.evolve(of.problem.train, x=x)
    other = attrs.evolve(of, problem=attrs.evolve(of.problem, train=train))
    assert changed(plain, other) == {"the data or its partition"}
    assert not torch.equal(x, of.problem.train.x)


def test_the_version_of_the_core_is_that_of_the_code_that_runs(stale_install):
    found = environment(prepared(), read_plugins(builtin))
    assert found["distributions"]["bflcore"] == __version__
    assert [text for text in found["warnings"] if "installed as version 0.0.1" in text]


def test_distributions_count_only_where_a_component_of_theirs_is_used():
    registry = load_registry()
    assert used_distributions(resolve(registry, "fedavg", {}, {}), registry) == {"bflcore"}
    used = used_distributions(resolve(registry, "bpfed", {}, {}), registry)
    assert used == {"bflcore", "bfl-bpfed"}


def test_a_run_whose_settings_were_edited_is_not_read_as_it_was(tmp_path):
    values = {"method": "fedavg", "rounds": 3, "inference": {"lr": 0.1}, "engine": {"workers": 2}}
    write_json(
        tmp_path / "environment.json",
        {"fingerprints": {"experiment.toml": settings_digest(values)}},
    )
    check_settings(tmp_path, values)
    check_settings(tmp_path, values | {"engine": {"workers": 1}, "min_clients": 2})  # no matter
    for change in ({"rounds": 4}, {"inference": {"lr": 0.2}}, {"engine": {"chunk": 8}}):
        with pytest.raises(RunError, match="experiment.toml is not what the run was started with"):
            check_settings(tmp_path, values | change)
    check_settings(tmp_path / "not begun", values)


def test_where_the_data_are_is_no_setting(tmp_path):
    """Neither for a run of this version, nor for one whose digest has the folder of its data."""
    values = {"rounds": 3, "data": {"data": "mnist", "data_dir": "/old"}}
    moved = {"rounds": 3, "data": {"data": "mnist", "data_dir": "/new"}}
    assert settings_digest(values) == settings_digest(moved)
    earlier = json.dumps(values | {"chunk": 0}, sort_keys=True).encode()
    for digest in (settings_digest(values), hashlib.sha256(earlier).hexdigest()):
        write_json(tmp_path / "environment.json", {"fingerprints": {"experiment.toml": digest}})
        check_settings(tmp_path, values)
    with pytest.raises(RunError, match="is not what the run was started with"):
        check_settings(tmp_path, values | {"data": {"data": "emnist"}})
