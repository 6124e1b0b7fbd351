"""Clients' memories in RAM and in files."""

import gc
import pickle
import threading

import pytest
import torch

from bflcore.engines.memories import Memories
from bflcore.errors import WriteError

SIZE = 16  # bytes of a memory


def memory(number):
    return {"mean": torch.arange(4.0) + number, "none": torch.zeros(0)}


def files(memories):
    gc.collect()
    memories[1]["mean"]  # files that nobody needs go at the next access
    return len(list(memories.folder.iterdir()))


@pytest.fixture
def memories():
    """Three memories, of which RAM holds two."""
    found = Memories(limit=2 * SIZE)
    found.update({client: memory(client) for client in range(3)})
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_every_memory_is_given_back_wherever_it_lies(memories):
    assert files(memories) == 1
    for client in (0, 1, 2, 0, 2, 1):
        same(memories[client], memory(client))
        same(dict(memories[client].items()), memory(client))


def test_the_least_recently_used_memory_goes_to_a_file():
    memories = Memories(limit=2 * SIZE)
    memories[0], memories[1] = memory(0), memory(1)
    assert files(memories) == 0
    memories[0]["mean"]  # now client 1's has not been used for longest
    memories[2] = memory(2)
    read = {path.name for path in memories.folder.iterdir()}
    assert len(read) == 1
    for client in (0, 2):  # both are in RAM: nothing is read or written
        memories[client]["mean"]
        assert {path.name for path in memories.folder.iterdir()} == read
    memories[1]["mean"]
    assert {path.name for path in memories.folder.iterdir()} != read


def test_a_limit_of_zero_keeps_everything_on_disk():
    memories = Memories(limit=0)
    memories.update({client: memory(client) for client in range(3)})
    for client in (0, 1, 2):
        same(memories[client], memory(client))
        assert files(memories) == 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([float("nan"), -0.0, 1e-45, float("-inf")]),
        torch.tensor([[1, -(2**62)]]),
        torch.tensor([True, False]),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([0.1, 3e38], dtype=torch.bfloat16),
        torch.arange(6.0).view(2, 3).T,
        torch.arange(6.0)[::2],
    ],
)
def test_a_file_holds_a_tensor_to_the_bit(tensor):
    memories = Memories(limit=0)
    memories[0] = {"t": tensor}
    found = memories[0]["t"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    exact = (found.contiguous().view(-1), tensor.contiguous().view(-1))
    one, other = (t.view(torch.uint8) for t in exact)
    assert torch.equal(one, other)


def test_a_memory_is_the_same_object_until_it_changes(memories):
    first = memories[0]
    for client in (1, 2, 0):
        memories[client]["mean"]
    assert memories[0] is first
    memories[0] = first  # storing what is there changes nothing
    assert memories[0] is first
    memories[0] = memory(9)
    assert memories[0] is not first
    same(first, memory(0))  # say, while a checkpoint still writes it


def test_a_memory_that_nobody_holds_leaves_nothing_behind():
    memories = Memories(limit=0)
    memories[0], memories[1] = memory(0), memory(1)
    held = memories[1]
    memories[1] = memory(2)
    assert files(memories) == 3
    del held
    assert files(memories) == 2
    del memories[0]
    assert files(memories) == 1
    assert list(memories) == [1]


def test_the_folder_outlives_the_session_while_a_memory_is_held_and_no_longer():
    memories = Memories(limit=0)
    memories[0] = memory(5)
    folder, held = memories.folder, memories[0]
    del memories
    gc.collect()
    same(held, memory(5))
    del held
    gc.collect()
    assert not folder.exists()


def test_a_memory_travels_to_another_process_as_plain_tensors(memories):
    found = pickle.loads(pickle.dumps(memories[0]))
    assert type(found) is dict
    same(found, memory(0))


def test_threads_may_read_while_others_store():
    memories, failures = Memories(limit=2 * SIZE), []
    memories.update({client: memory(client) for client in range(8)})

    def read():
        for _ in range(50):
            for client in range(8):
                mean = memories[client]["mean"]
                if not torch.equal(mean, torch.arange(4.0) + client):
                    failures.append(mean)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        for client in range(8):
            memories[client] = memory(client)
    for thread in threads:
        thread.join()
    assert not failures


def test_files_go_where_they_are_told_and_vanish_with_the_memories(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    memories = Memories(limit=0)
    memories.use_folder(tmp_path / "run" / "memories")
    memories[0] = memory(3)
    same(memories[0], memory(3))
    assert [path.parts[-4:-2] for path in tmp_path.rglob("*#*")] == [("run", "memories")]
    del memories
    gc.collect()
    assert not list((tmp_path / "run" / "memories").iterdir())


def test_memories_that_are_collected_late_leave_those_of_the_next_run_alone(tmp_path):
    failed, resumed = Memories(limit=0, folder=tmp_path), Memories(limit=0, folder=tmp_path)
    failed[0], resumed[0] = memory(1), memory(2)
    del failed
    gc.collect()
    same(resumed[0], memory(2))


def test_a_memory_that_does_not_fit_on_the_disk_is_one_line(tmp_path):
    memories = Memories(limit=0)
    memories.use_folder(tmp_path / "a file" / "memories")
    (tmp_path / "a file").touch()
    with pytest.raises(WriteError, match=r"memories cannot be written \(Not a directory\)"):
        memories[0] = memory(0)
