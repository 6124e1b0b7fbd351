"""The server's session and the nodes, over a grid that hands messages from one to the other."""

from __future__ import annotations

from functools import partial

import attrs
import pytest
import torch
from flwr.app import Message

from bfl_flower.node import MemoryStore, Node
from bfl_flower.wire import FIT, Task
from bflcore import BflError, ClientError, Map, Variational
from bflcore.engines.client import ClientWorker
from bflcore.engines.local import Local
from bflcore.errors import RoundError, RunWarning
from bflcore.experiments.surveys import calibrate
from bflcore.problem.calibration.conformal import Conformal
from bflcore.testing import problems

from .loopback import grid_of, session_of


class FineTuned(Map):
    """Before it predicts, a client's head learns something."""

    name = "fine-tuned"

    def personalise(self, problem, broadcast, cohort):
        return {name: tensor + 1 for name, tensor in cohort.memory.items()}


pytestmark = pytest.mark.usefixtures("identity")


@pytest.fixture
def problem():
    return problems.separable(sharing="body", dtype=torch.float32)


def two_rounds(session, broadcast, clients):
    """Fit, store, and fit from client 0's posterior; then evaluate."""
    for reply in list(session.fit(broadcast, clients)):
        session.store(reply)
        if reply.clients == (0,):
            following = attrs.evolve(broadcast, round=1, start=reply.posterior[0])
    replies = list(session.fit(following, clients))
    for reply in replies:
        session.store(reply)
    return replies, list(session.evaluate(following, clients))


@pytest.mark.parametrize("inference", [problems.build(Map), problems.build(Variational)])
@pytest.mark.parametrize("stays", [False, True])
def test_two_rounds_are_the_local_engines_to_the_bit(problem, inference, stays, tmp_path):
    broadcast = problems.first_broadcast(inference, problem)
    with Local(workers=1).open(problem, inference, 10) as local:
        expected, sums = two_rounds(local, broadcast, problem.clients)
        memories = dict(local.memories)
    grid = grid_of(
        problem, inference, (lambda c: MemoryStore(tmp_path / str(c))) if stays else None
    )
    session = session_of(grid, inference, problem)
    found, figures = two_rounds(session, broadcast, problem.clients)
    assert [reply.clients for reply in found] == [(0,), (1,), (2,)]
    for one, other in zip(found, expected, strict=True):
        mine, theirs = (attrs.evolve(reply, memory={}) for reply in (one, other))
        assert not problems.difference(mine, theirs)
    assert not problems.difference([f.personal for f in figures], [s.personal for s in sums])
    if stays:  # the server has a token, the node the memory
        assert {c: int(m["round"]) for c, m in session.memories.items()} == dict.fromkeys(
            range(3), 2
        )
        memory = grid.nodes[99].store.get(session.memories[1])
        assert not problems.difference(memory, memories[1])
    else:
        assert not problems.difference(session.memories, memories)


@pytest.mark.parametrize("stays", [False, True])
def test_nodes_calibrate_as_the_local_engine_does_to_the_bit(problem, stays, tmp_path):
    conformal = Conformal(scope="client")
    problem = attrs.evolve(problem, calibration=problem.train, calibrators=(conformal,))
    inference = problems.build(Variational)
    broadcast = problems.first_broadcast(inference, problem)

    def calibrated(session):
        for reply in list(session.fit(broadcast, problem.clients)):
            session.store(reply)
        after, found = calibrate(problem, session, broadcast)
        return after.calibration, found.bytes_up, list(session.evaluate(after, problem.clients))

    with Local(workers=1).open(problem, inference, 10) as local:
        expected = calibrated(local)
    store = (lambda c: MemoryStore(tmp_path / str(c))) if stays else None
    found = calibrated(session_of(grid_of(problem, inference, store), inference, problem))
    assert not problems.difference(found, expected)
    assert found[1] == expected[1]
    assert found[2][0].calibrated


@pytest.mark.parametrize("stays", [False, True])
def test_ready_clients_send_their_memories_unless_these_stay_on_the_nodes(problem, stays, tmp_path):
    inference = FineTuned(**attrs.asdict(problems.build(Map), recurse=False))
    broadcast = problems.first_broadcast(inference, problem)
    with Local(workers=1).open(problem, inference, 10) as local:
        expected = list(local.personalise(broadcast, problem.clients))
    grid = grid_of(
        problem, inference, (lambda c: MemoryStore(tmp_path / str(c))) if stays else None
    )
    kept = {}
    for number, node in grid.nodes.items():
        keep = partial(kept.__setitem__, node.client)
        grid.nodes[number] = attrs.evolve(node, keep=lambda _, own, keep=keep: keep(own))
    found = list(session_of(grid, inference, problem).personalise(broadcast, problem.clients))
    if stays:
        assert found == []
        found = [kept[client] for client in sorted(kept)]
    else:
        assert kept == {}
    assert [reply.client for reply in found] == [0, 1, 2]
    assert not problems.difference(found, expected)


def test_a_memory_on_the_node_is_that_of_the_round_which_the_server_accepted(problem, tmp_path):
    inference = problems.build(Map)
    store = MemoryStore(tmp_path)
    grid = grid_of(problem, inference, lambda client: store if client == 0 else None)
    session = session_of(grid, inference, problem)
    broadcast = problems.first_broadcast(inference, problem)
    (first,) = session.fit(broadcast, [0])
    session.store(first)
    kept = store.get(session.memories[0])
    second = attrs.evolve(broadcast, round=1)
    (refused,) = session.fit(second, [0])  # not stored
    (again,) = session.fit(second, [0])
    assert not problems.difference(refused, again)
    assert not problems.difference(store.get(session.memories[0]), kept)


def test_a_store_keeps_the_last_rounds_and_replaces_a_lost_future(tmp_path):
    store = MemoryStore(tmp_path, depth=2)
    tokens = [store.put({"age": torch.tensor(age)}, age) for age in range(1, 5)]
    with pytest.raises(BflError, match="memory of round 2 cannot be read from 000002.safetensors"):
        store.get(tokens[1])
    assert [int(store.get(token)["age"]) for token in tokens[2:]] == [3, 4]
    store.put({"age": torch.tensor(30)}, 3)  # the server went back
    assert int(store.get(tokens[2])["age"]) == 30
    store.put({"age": torch.tensor(40)}, 4)
    assert int(store.get(tokens[3])["age"]) == 40


def test_a_run_that_begins_again_keeps_its_own_memories(tmp_path):
    store = MemoryStore(tmp_path, depth=2)
    for age in (48, 49, 50):  # an earlier run of the same experiment
        store.put({"age": torch.tensor(age)}, age)
    for age in (1, 2, 3):
        token = store.put({"age": torch.tensor(-age)}, age)
        assert int(store.get(token)["age"]) == -age
    assert len(list(tmp_path.glob("*.safetensors"))) == 4  # depth of each run


def test_a_lost_memory_is_the_clients_error(problem, tmp_path):
    inference = problems.build(Map)
    session = session_of(
        grid_of(problem, inference, lambda _: MemoryStore(tmp_path)), inference, problem
    )
    session.restore({1: {"round": torch.tensor(8)}})
    replies = list(session.fit(problems.first_broadcast(inference, problem), [0, 1]))
    assert isinstance(replies[1], ClientError)
    assert "its memory of round 8 cannot be read" in replies[1].reason
    session.restore({1: {"personal.mean": torch.zeros(2)}})  # of a simulation, say
    (_, error) = session.fit(problems.first_broadcast(inference, problem), [0, 1])
    assert error.reason == "the server sent a memory, but this node keeps its own"


def test_a_node_that_fails_or_is_gone_costs_its_client_only(problem):
    inference = problems.build(Map)
    grid = grid_of(problem, inference)
    session = session_of(grid, inference, problem)
    broadcast = problems.first_broadcast(inference, problem)
    assert len(list(session.fit(broadcast, problem.clients))) == 3
    grid.broken.add(99)
    replies = list(session.fit(broadcast, problem.clients))
    assert [r.clients for r in replies if not isinstance(r, ClientError)] == [(0,), (2,)]
    (error,) = (reply for reply in replies if isinstance(reply, ClientError))
    assert (error.client, error.stage, error.reason) == (1, "fit", "node is unavailable")
    del grid.nodes[99]
    (error,) = (r for r in session.evaluate(broadcast, [0, 1]) if isinstance(r, ClientError))
    assert error.reason == "no connected node holds its data"


def test_a_client_that_comes_back_as_another_node_with_its_key_takes_part_again(problem, tmp_path):
    inference = problems.build(Map)
    grid = grid_of(problem, inference, lambda client: MemoryStore(tmp_path / str(client)))
    session = session_of(grid, inference, problem)
    broadcast = problems.first_broadcast(inference, problem)
    first = list(session.fit(broadcast, problem.clients))
    grid.nodes[7] = grid.nodes.pop(99)
    assert not problems.difference(list(session.fit(broadcast, problem.clients)), first)
    assert session.registry.nodes == {0: 100, 1: 7, 2: 98}


def test_a_node_that_is_silent_is_dropped_when_its_time_is_over(problem):
    inference = problems.build(Map)
    grid = grid_of(problem, inference)
    session = session_of(grid, inference, problem, timeout=0.3)
    session.wait_for(3, 5)
    grid.mute.add(100)
    replies = list(session.fit(problems.first_broadcast(inference, problem), problem.clients))
    assert isinstance(replies[0], ClientError)
    assert replies[0].reason == "no reply within 0.3 s (--client-timeout)"
    assert [reply.clients for reply in replies[1:]] == [(1,), (2,)]


def test_a_run_waits_for_its_nodes_and_says_how_many_connected(problem):
    inference = problems.build(Map)
    grid = grid_of(problem, inference)
    del grid.nodes[98]
    session = session_of(grid, inference, problem)
    assert session.wait_for(2, 1) == [0, 1]
    with pytest.raises(RoundError, match="2 of 3 clients' nodes connected within 0.1 s"):
        session.wait_for(3, 0.1)


def test_a_node_that_holds_a_client_of_no_concern_is_not_asked(problem):
    inference = problems.build(Map)
    grid = grid_of(problem, inference)
    grid.nodes[50] = Node(77, ClientWorker(problem, inference, 10))
    session = session_of(grid, inference, problem)
    with pytest.warns(RunWarning, match="node 50 is refused: it claims client 77, which is not"):
        assert session.wait_for(3, 1) == [0, 1, 2]


def test_a_node_answers_for_its_own_client_alone(problem):
    inference = problems.build(Map)
    task = Task(FIT, 0, problems.first_broadcast(inference, problem), {})
    asked = Message(task.pack(), 99, FIT)
    asked.metadata.__dict__["_message_id"] = "1"
    (error,) = task.read(Node(1, ClientWorker(problem, inference, 10)).answer(asked).content)
    assert error.reason == "this node holds client 1"
