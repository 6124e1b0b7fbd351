"""The clients' models at the end of a run."""

import pytest
import torch

from bflcore import ClientError, RunError
from bflcore.experiments.models import Models, read_tensors, save_tensors
from bflcore.messages import Personalised


def test_memories_come_back_and_the_index_says_what_became_of_each_client(tmp_path):
    models = Models(tmp_path / "models")
    memory = {"head.mean": torch.arange(3.0), "empty": torch.zeros(0)}
    replies = [
        Personalised(0, None),
        Personalised(3, memory),
        ClientError(4, "personalise", "it is gone"),
    ]
    models.write(7, iter(replies))
    assert models.index(7) == {
        0: "stored",
        3: "own",
        4: "client 4 failed in personalise: it is gone",
    }
    found = models.read(3)
    assert found.keys() == memory.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in memory.items())


def test_writing_again_leaves_nothing_of_before(tmp_path):
    models = Models(tmp_path / "models")
    models.write(1, [Personalised(0, {"a": torch.ones(1)}), Personalised(1, None)])
    models.write(2, [Personalised(1, {"a": torch.ones(1)})])
    assert sorted(path.name for path in models.folder.iterdir()) == [
        "000001.safetensors",
        "index.json",
    ]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"round": 7}', '{"clients": {}}'])
def test_an_index_that_is_damaged_or_absent_is_one_line(tmp_path, content):
    models = Models(tmp_path)
    if content is not None:
        (tmp_path / "index.json").write_text(content)
    with pytest.raises(RunError, match="index.json cannot be read.*run the experiment again"):
        models.index(7)


def test_an_index_of_another_round_is_refused(tmp_path):
    models = Models(tmp_path / "models")
    models.write(6, [])
    with pytest.raises(RunError, match="is of round 6, but the checkpoint is of round 7"):
        models.index(7)


def test_tensors_are_read_to_memory_of_their_own(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"b": torch.ones(1), "a": torch.arange(5.0)[1:]}, {"x": [1]})
    header, tensors, _ = read_tensors(path)
    assert header == {"x": [1]}
    assert tensors["a"].tolist() == [1, 2, 3, 4]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values())


def test_own_calibration_sums_come_back_beside_the_memory(tmp_path):
    models = Models(tmp_path / "models")
    sums = {"conformal.scores": torch.arange(4).reshape(1, 4)}
    models.write(1, [Personalised(0, None, sums), Personalised(1, {"a": torch.ones(1)})])
    assert models.index(1) == {0: "stored", 1: "own"}
    assert models.read_calibration(0)["conformal.scores"].equal(sums["conformal.scores"])
    assert models.read_calibration(1) == {}
