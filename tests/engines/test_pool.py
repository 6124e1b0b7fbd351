"""Process pools: order, isolation of crashes, time limits."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import pytest
import torch

from bflcore import ClientError, Map
from bflcore.engines.pool import InProcessPool, ProcessPool, Task, open_pool
from bflcore.messages import Answer
from bflcore.rounds import Recipe, begin
from bflcore.testing.problems import problem


@attrs.frozen(eq=False)
class Scripted:
    """A worker that does what a task's memory says, and replies with its process and a sum."""

    problem: object

    def fit(self, broadcast, clients, memories):
        (memory,) = memories
        if "seconds" in memory:
            time.sleep(float(memory["seconds"]))
        if "exit" in memory:
            os._exit(int(memory["exit"]))
        if "dies once" in memory:
            mark = Path(bytes(memory["dies once"].tolist()).decode())
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if "half a message" in memory:
            (connection,) = (c for c in gc.get_objects() if isinstance(c, Connection))
            os.write(connection.fileno(), b"\0\0\0\x09abc")  # three of nine bytes
            time.sleep(600)
        if "reply" in memory:
            return [HOSTILE[int(memory["reply"])](clients[0])]
        found = {"process": torch.tensor(os.getpid()), "sum": broadcast.start.mean.sum()}
        return [Answer(client, found) for client in clients]

    def evaluate(self, broadcast, clients, memories):
        return [Answer(client, {"evaluated": torch.tensor(True)}) for client in clients]


def process_of(replies):
    return int(replies[0].sums["process"])


def clients_of(tasks):
    return [[reply.client for reply in replies] for replies in tasks]


class Trap:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("sprung",)


HOSTILE = [
    lambda client: Trap(),
    lambda client: None,
    lambda client: {"client": client},
    lambda client: Answer(client, {"trap": Trap()}),
    lambda client: Answer(client, {"trap": torch.nn.Parameter(torch.ones(1))}),
    lambda client: Answer(client, {"trap": torch.eye(2).to_sparse()}),
    lambda client: Answer(client + 1, {}),
    lambda client: Answer(True, {}),
    lambda client: Answer([client], {}),
    lambda client: ClientError(client + 1, "fit", "framed"),
]


@pytest.fixture(scope="module")
def work():
    of = problem()
    return Scripted(of), begin(Recipe(Map(), None, None, None), of)


def tasks(*scripts):
    return [
        Task([client], [{name: torch.tensor(value) for name, value in script.items()}])
        for client, script in enumerate(scripts)
    ]


def test_one_process_without_a_time_limit_is_this_one(work):
    worker, broadcast = work
    with open_pool(worker, 1) as pool:
        assert isinstance(pool, InProcessPool)
        (reply,) = next(pool.run("fit", broadcast, tasks({})))
    assert (process_of([reply]), reply.client) == (os.getpid(), 0)
    with open_pool(worker, 1, timeout=9) as pool:
        assert isinstance(pool, ProcessPool)


def test_replies_come_in_the_order_of_tasks_whichever_is_ready_first(work):
    worker, broadcast = work
    with open_pool(worker, 2) as pool:
        list(pool.run("evaluate", broadcast, tasks({}, {})))  # both processes have started
        replies = list(pool.run("fit", broadcast, tasks({"seconds": 0.4}, {}, {}, {})))
        assert clients_of(replies) == [[0], [1], [2], [3]]
        processes = [process_of(reply) for reply in replies]
        assert processes[1:] == [processes[1]] * 3  # the free process took all the others
        assert processes[0] not in {processes[1], os.getpid()}
        sums = {float(reply.sums["sum"]) for (reply,) in replies}
        assert sums == {float(broadcast.start.mean.sum())}
        ((found,),) = pool.run("evaluate", broadcast, tasks({}))
        assert (found.client, bool(found.sums["evaluated"])) == (0, True)


def test_a_process_that_dies_costs_its_own_task_and_is_replaced(work):
    worker, broadcast = work
    with open_pool(worker, 2) as pool:
        first, second, third = pool.run("fit", broadcast, tasks({}, {"exit": 3}, {}))
        assert (first[0].client, third[0].client) == (0, 2)
        (error,) = second
        assert isinstance(error, ClientError)
        assert (error.client, error.stage) == (1, "fit")
        assert error.reason == "its worker process died (exit code 3)"
        assert len(list(pool.run("fit", broadcast, tasks({}, {}, {}, {})))) == 4


def test_a_task_whose_process_is_killed_by_something_else_is_tried_once_more(work, tmp_path):
    worker, broadcast = work
    once = list(str(tmp_path / "mark").encode())
    with open_pool(worker, 2) as pool:
        replies = list(pool.run("fit", broadcast, tasks({}, {"dies once": once}, {})))
    assert clients_of(replies) == [[0], [1], [2]]
    assert all(isinstance(reply, Answer) for (reply,) in replies)


def test_what_a_process_sends_is_never_unpickled_and_names_its_own_clients(
    work, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    worker, broadcast = work
    with open_pool(worker, 2) as pool:
        hostile = tasks(*({"reply": number} for number in range(len(HOSTILE))), {})
        *refused, (last,) = pool.run("fit", broadcast, hostile)
    assert isinstance(last, Answer)
    for client, (error,) in enumerate(refused):
        assert isinstance(error, ClientError)
        assert (error.client, error.stage) == (client, "fit")
        assert error.reason.startswith("malformed reply (")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_process_that_freezes_while_it_sends_is_too_slow(work):
    worker, broadcast = work
    with open_pool(worker, 2, timeout=2.0) as pool:
        slow, quick = pool.run("fit", broadcast, tasks({"half a message": 1}, {}))
    assert slow[0].reason == "it took longer than 2 s (--client-timeout)"
    assert quick[0].client == 1


def test_a_process_that_died_while_idle_is_replaced_and_costs_nothing(work):
    worker, broadcast = work
    with open_pool(worker, 2) as pool:
        first, _ = pool.run("fit", broadcast, tasks({"seconds": 0.2}, {"seconds": 0.2}))
        victim = process_of(first)
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 9
        while victim in {child.pid for child in multiprocessing.active_children()}:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        replies = list(pool.run("fit", broadcast, tasks({}, {}, {})))
        assert clients_of(replies) == [[0], [1], [2]]
        assert victim not in map(process_of, replies)


def test_a_client_that_takes_too_long_is_dropped_and_starting_a_process_does_not_count(work):
    worker, broadcast = work
    with open_pool(worker, 2, timeout=0.5) as pool:  # starting takes longer than that
        slow, quick = pool.run("fit", broadcast, tasks({"seconds": 60.0}, {"seconds": 0.1}))
        assert slow[0].reason == "it took longer than 0.5 s (--client-timeout)"
        assert quick[0].client == 1


def test_closing_a_pool_stops_its_processes(work):
    worker, broadcast = work
    with open_pool(worker, 2) as pool:
        replies = list(pool.run("fit", broadcast, tasks({"seconds": 0.2}, {"seconds": 0.2})))
    for reply in replies:
        with pytest.raises(ProcessLookupError):
            os.kill(process_of(reply), 0)


@pytest.mark.parametrize("size", [1, 2_000_000])  # a large task does not fit into the pipe
def test_a_process_that_is_frozen_before_it_begins_is_replaced(work, monkeypatch, size):
    worker, broadcast = work
    with closing(ProcessPool(worker, 2, timeout=4.0)) as pool:
        for _ in range(3):  # both have started
            list(pool.run("evaluate", broadcast, tasks({}, {})))
        monkeypatch.setattr("bflcore.engines.pool.STARTING", 1.0)
        frozen = pool._processes[0].process  # noqa: SLF001 - it gets the first task
        os.kill(frozen.pid, signal.SIGSTOP)
        first, *others = tasks({}, {})
        heavy = Task(first.clients, [{"ballast": torch.zeros(size)}])
        replies = list(pool.run("fit", broadcast, [heavy, *others]))
    assert not frozen.is_alive()
    assert isinstance(replies[0][0], ClientError)
    assert "it took longer than 4 s (--client-timeout)" in str(replies[0][0])
    assert clients_of(replies[1:]) == [[1]]


def test_a_time_limit_may_be_longer_than_the_system_can_wait(work):
    worker, broadcast = work
    with open_pool(worker, 1, timeout=3e6) as pool:
        (reply,) = next(pool.run("fit", broadcast, tasks({})))
    assert reply.client == 0


ORPHANS = """
import sys, torch
sys.path.insert(0, {folder!r})
from test_pool import Scripted, tasks
from bflcore import Map
from bflcore.engines.pool import ProcessPool
from bflcore.rounds import Recipe, begin
from bflcore.testing.problems import problem
if __name__ == "__main__":
    of = problem()
    pool = ProcessPool(Scripted(of), 1, 0)
    print(pool._processes[0].process.pid, flush=True)
    list(pool.run("fit", begin(Recipe(Map(), None, None, None), of), tasks({{"seconds": 600}})))
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_process_at_work_ends_when_its_parent_is_killed(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS.format(folder=str(Path(__file__).parent)))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    time.sleep(5)  # it is at work, or starting
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(600):
        if not Path(f"/proc/{child}").exists():
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the worker outlived its parent by a minute")
