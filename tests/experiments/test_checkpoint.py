"""Checkpoints: what was written comes back, and little is written."""

from __future__ import annotations

import random

import pytest
import torch

from bflcore import Broadcast, Gaussian
from bflcore.errors import RunError, RunWarning
from bflcore.experiments.checkpoint import Checkpoints
from bflcore.testing.problems import gaussian, normal


def broadcast(number, shift=0.0):
    start = gaussian(4, seed=number)
    return Broadcast(number, start, Gaussian(start.mean + shift, start.variance), {})


def test_a_checkpoint_gives_back_what_it_took(tmp_path):
    memories = {
        7: {"a.b": normal(3), "count": torch.tensor(5), "mask": torch.tensor([True, False])},
        11: {},
    }
    sent = Broadcast(3, gaussian(4), gaussian(4, seed=9), {"noise": torch.tensor(0.25)})
    with Checkpoints(tmp_path / "checkpoint") as store:
        store.write(sent, memories, {"x": 0.1})
    back = Checkpoints(tmp_path / "checkpoint").read(Gaussian)
    assert back.state == {"x": 0.1}
    assert back.broadcast.round == 3
    assert torch.equal(back.broadcast.prior.variance, sent.prior.variance)
    assert torch.equal(back.broadcast.hyper["noise"], sent.hyper["noise"])
    assert back.memories.keys() == memories.keys()
    for name, tensor in memories[7].items():
        assert torch.equal(back.memories[7][name], tensor)


def test_a_prior_that_is_the_start_is_stored_once(tmp_path):
    start = gaussian(4)
    with Checkpoints(tmp_path / "checkpoint") as store:
        store.write(Broadcast(1, start, start), {}, {})
    back = Checkpoints(tmp_path / "checkpoint").read(Gaussian).broadcast
    assert back.prior is back.start


def test_only_memories_that_changed_are_written_and_little_is_kept(tmp_path):
    folder, draw = tmp_path / "checkpoint", random.Random(0)
    memories = {client: {"m": normal(4, seed=client)} for client in range(10)}
    with Checkpoints(folder) as store:
        store.write(broadcast(0), memories, {})
    for number in range(1, 40):
        for client in draw.sample(range(10), 2):
            memories[client] = {"m": normal(4, seed=100 * number + client)}
        with Checkpoints(folder) as store:  # as a resumed run does
            held = store.read(Gaussian).memories
            held |= {c: m for c, m in memories.items() if not torch.equal(m["m"], held[c]["m"])}
            store.write(broadcast(number), held, {})
        found = Checkpoints(folder).read(Gaussian)
        assert all(torch.equal(found.memories[c]["m"], m["m"]) for c, m in memories.items())
        sizes = [len(_keys(path)) for path in folder.glob("*.clients.safetensors")]
        assert sum(sizes) <= 40  # of two checkpoints
        assert min(sizes) <= 2 or sizes == [10]
        assert len([p for p in folder.iterdir() if p.stem.isdecimal()]) == 2


def _keys(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


def test_a_checkpoint_that_cannot_be_written_ends_the_run_in_one_line(tmp_path):
    (tmp_path / "checkpoint").write_text("a file where the folder should be")
    store = Checkpoints(tmp_path / "checkpoint")
    with pytest.raises(RunError, match=r"checkpoint cannot be written \(File exists\)"), store:
        store.write(broadcast(0), {}, {})


def written(folder, rounds=3, run="mine", clients=2):
    """Write the checkpoints of some rounds; every memory changes in every round."""
    with Checkpoints(folder, run) as store:
        for number in range(rounds):
            memories = {c: {"m": normal(4, seed=10 * number + c)} for c in range(clients)}
            store.write(broadcast(number), memories, {"evaluated": number})
    return Checkpoints(folder, run)


@pytest.mark.parametrize("name", ["000002.safetensors", "000002.clients.safetensors"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, name):
    store = written(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[-1] ^= 1  # one bit of a tensor
    (tmp_path / name).write_bytes(content)
    assert not store.sound()
    with pytest.raises(RunError, match="not match its digest.*repair the run with: bfl resume"):
        store.read(Gaussian)
    with pytest.warns(RunWarning, match=f"{name}.*continuing from the checkpoint of round 1"):
        found = store.read_sound(Gaussian)
    assert found.broadcast.round == found.state["evaluated"] == 1
    assert torch.equal(found.memories[1]["m"], normal(4, seed=11))
    with store:  # the run goes on
        store.write(broadcast(2), found.memories, {})
    assert Checkpoints(tmp_path, "mine").sound()


def test_when_both_checkpoints_are_damaged_the_run_has_to_start_again(tmp_path):
    store = written(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RunError, match="cannot be read.*start the run again"):
        store.read_sound(Gaussian)


def test_files_of_another_run_or_round_are_noticed(tmp_path):
    written(tmp_path / "a"), written(tmp_path / "b", run="other")
    with pytest.raises(RunError, match="of another run"):
        Checkpoints(tmp_path / "a", "other").read(Gaussian)
    swapped = "000002.clients.safetensors"
    (tmp_path / "a" / swapped).write_bytes(
        (tmp_path / "a" / "000001.clients.safetensors").read_bytes()
    )
    with pytest.raises(RunError, match=f"{swapped} is of another checkpoint"):
        Checkpoints(tmp_path / "a", "mine").read(Gaussian)
    newest = tmp_path / "b" / "000002.safetensors"
    newest.write_bytes((tmp_path / "b" / "000001.safetensors").read_bytes())
    with pytest.raises(RunError, match="of another run or round"):
        Checkpoints(tmp_path / "b", "other").read(Gaussian)


def test_without_a_checkpoint_there_is_nothing_to_read(tmp_path):
    assert Checkpoints(tmp_path).read_sound(Gaussian) is None
    assert Checkpoints(tmp_path).read(Gaussian) is None
