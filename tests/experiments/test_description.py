"""What a run knows of its data when they are gone."""

import json

import numpy as np
import pytest

from bflcore import RunError
from bflcore.experiments.description import FILE, Client, Description
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.integrity import write_json
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry


def prepared(**data):
    flags = {"data": data, "dataset": {"owners": 4, "samples": 20, "features": 6, "classes": 3}}
    if not data["data"].startswith("synthetic"):
        del flags["dataset"]
    return prepare(resolve(load_registry(), "fedavg", {}, flags))


def hospitals(path, **arrays):
    y = np.arange(60) % 3
    given = {"x": np.zeros((60, 2)), "y": y, "client": np.repeat([900, 7, 107], 20)}
    np.savez(path, **given | arrays)
    return str(path)


def test_owners_keep_their_ids_and_their_numbers_of_samples(tmp_path):
    data = hospitals(tmp_path / "a.npz")
    given = {"partition": "natural", "clients": 3, "validation_fraction": 0.25}
    found = prepared(data=data, **given).description
    assert [client.id for client in found.clients] == [7, 107, 900]
    assert {(c.train, c.test, c.validation) for c in found.clients} == {(12, 4, 4)}
    assert found.classes == ("0", "1", "2")


def test_without_natural_owners_clients_have_numbers(tmp_path):
    data = hospitals(tmp_path / "a.npz")
    found = prepared(data=data, partition="iid", clients=2).description
    assert [client.id for client in found.clients] == [0, 1]


def test_the_form_of_samples_is_described(tmp_path):
    pixels = np.zeros((60, 1, 4, 4), np.uint8)
    found = prepared(data=hospitals(tmp_path / "a.npz", x=pixels), clients=2).description
    assert (found.shape, found.byte, found.task, found.outputs) == (
        (1, 4, 4),
        255.0,
        "classification",
        3,
    )
    real = hospitals(tmp_path / "b.npz", y=np.zeros((60, 2)))
    found = prepared(data=real, clients=2, novel_clients=1).description
    assert (found.byte, found.task, found.outputs, found.classes, found.novel) == (
        None,
        "regression",
        2,
        (),
        1,
    )


def test_a_description_comes_back_from_its_file(tmp_path):
    of = prepared(data="synthetic", partition="natural", clients=3)
    directory = RunDirectory.create(tmp_path / "run", of, load_registry())
    assert Description.read(directory.path) == of.description
    # Described before: a run of an earlier version gets the file, others keep theirs.
    (directory.path / FILE).unlink()
    directory.describe(of)
    assert Description.read(directory.path) == of.description


def test_data_without_samples_have_its_form():
    of = prepared(data="synthetic", partition="natural", clients=3).description
    dataset, partition = of.without_samples()
    assert (dataset.x.shape, dataset.outputs, partition.clients) == ((0, 6), 3, 3)


def test_a_file_for_others_does_not_name_them():
    described = prepared(data="synthetic", partition="natural", clients=3).description
    assert described.only(1).clients == (Client(0), described.clients[1], Client(2))
    assert described.only(-1).clients == (Client(0), Client(1), Client(2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "data.json is missing: the run was started by an earlier version; run it again"),
        ("{", "data.json cannot be read"),
        ("[]", "data.json cannot be read"),
        ({"format": 99}, "data.json has another format; it is of another version of bflcore"),
        ({"format": 1, "clients": [], "shape": [1]}, "does not describe"),
        ({"format": 1, "clients": 5, "shape": [1]}, "does not describe"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, content, message):
    if isinstance(content, dict):
        write_json(tmp_path / FILE, content)
    elif content is not None:
        (tmp_path / FILE).write_text(content)
    with pytest.raises(RunError, match=message) as error:
        Description.read(tmp_path)
    assert "\n" not in str(error.value)


def test_the_file_holds_no_sample(tmp_path):
    data = hospitals(tmp_path / "a.npz", x=np.full((60, 2), 123.456))
    text = json.dumps(prepared(data=data, clients=2).description.as_json())
    assert "123" not in text
