"""What nodes may try against the server and against each other, and what becomes of it."""

from __future__ import annotations

import io
import json
import time
import warnings

import attrs
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from bfl_flower import session as sessions
from bfl_flower.node import MemoryStore, Node
from bfl_flower.wire import CALIBRATE, EVALUATE, FIT, IDENTIFY, SURVEY, pack
from bflcore import ClientError, Map
from bflcore.engines.client import ClientWorker
from bflcore.errors import RunError, RunWarning
from bflcore.messages import LocalResult
from bflcore.testing import problems

from .loopback import grid_of, session_of

pytestmark = pytest.mark.usefixtures("identity")

INFERENCE = problems.build(Map)


@pytest.fixture
def problem():
    return problems.separable(sharing="body", dtype=torch.float32)


@pytest.fixture
def broadcast(problem):
    return problems.first_broadcast(INFERENCE, problem)


class Liar:
    """A node that answers what it likes to messages of one kind, and otherwise as it should."""

    def __init__(self, node, kind, answer):
        self.node, self.kind, self.given = node, kind, answer
        self.said = None

    def answer(self, message):
        if message.metadata.message_type.removesuffix(".default") == self.kind:
            self.said = self.node.answer(message).content
            given = self.given(self.said) if callable(self.given) else self.given
            return Message(given, reply_to=message)
        return self.node.answer(message)


def impostor(problem, client, store=None):
    return Node(client, ClientWorker(problem, INFERENCE, 10), store)


def asked(grid, node):
    return [kind for number, kind in grid.asked if number == node]


# Identity: a client belongs to one node for the whole run.


def test_a_node_that_answers_in_anothers_name_is_refused_and_named(problem, broadcast):
    grid = grid_of(problem, INFERENCE)
    session = session_of(grid, INFERENCE, problem)
    session.wait_for(3, 5)
    grid.nodes[7] = impostor(problem, 1)
    with pytest.warns(RunWarning, match="node 7 is refused: it claims client 1, which node 99 hol"):
        replies = list(session.fit(broadcast, problem.clients))
    assert [reply.clients for reply in replies] == [(0,), (1,), (2,)]
    assert asked(grid, 7) == [IDENTIFY]


def test_after_a_blink_nobody_else_takes_a_clients_place_or_gets_its_memory(problem, broadcast):
    grid = grid_of(problem, INFERENCE)
    session = session_of(grid, INFERENCE, problem, timeout=1)
    for reply in list(session.fit(broadcast, problem.clients)):
        session.store(reply)
    away = grid.nodes.pop(99)
    grid.nodes[7] = impostor(problem, 1)
    with pytest.warns(RunWarning, match="cannot prove that it is the same node"):
        replies = list(session.fit(broadcast, problem.clients))
    assert [r.clients for r in replies if isinstance(r, LocalResult)] == [(0,), (2,)]
    (error,) = (reply for reply in replies if isinstance(reply, ClientError))
    assert (error.client, "node 7" in error.reason) == (1, True)
    assert asked(grid, 7) == [IDENTIFY]
    grid.nodes[99] = away  # the same node id: Flower ties it to the node's key
    assert [reply.clients for reply in session.fit(broadcast, problem.clients)] == [
        (0,),
        (1,),
        (2,),
    ]


def test_a_node_that_holds_a_client_cannot_claim_a_second_one(problem, broadcast):
    grid = grid_of(problem, INFERENCE)
    del grid.nodes[98]
    session = session_of(grid, INFERENCE, problem, timeout=1)
    session.wait_for(2, 5)
    del grid.nodes[99]
    list(session.fit(broadcast, [0]))
    grid.nodes[99] = impostor(problem, 2)  # it comes back as client 2's
    replies = list(session.fit(broadcast, problem.clients))
    assert [r.client for r in replies if isinstance(r, ClientError)] == [1, 2]


def test_another_nodes_key_or_signature_does_not_open_a_clients_place(problem, broadcast, tmp_path):
    grid = grid_of(problem, INFERENCE, lambda client: MemoryStore(tmp_path / str(client)))
    grid.nodes[99] = Liar(grid.nodes[99], IDENTIFY, lambda said: said)
    session = session_of(grid, INFERENCE, problem, timeout=1)
    session.wait_for(3, 5)
    overheard = grid.nodes.pop(99).said
    stranger = impostor(problem, 1, MemoryStore(tmp_path / "stranger"))
    for node, said in ((7, lambda own: own), (8, overheard)):
        grid.nodes[node] = Liar(stranger, IDENTIFY, said)
        with pytest.warns(RunWarning, match=f"node {node} is refused: "):
            (reply,) = session.fit(broadcast, [1])
        assert isinstance(reply, ClientError)
    assert {kind for number, kind in grid.asked if number in {7, 8}} == {IDENTIFY}


def test_a_run_that_continues_keeps_the_holders_of_its_clients(problem, broadcast, tmp_path):
    file = tmp_path / "nodes.json"
    grid = grid_of(problem, INFERENCE, lambda client: MemoryStore(tmp_path / str(client)))
    session_of(grid, INFERENCE, problem, file=file).wait_for(3, 5)
    owner = grid.nodes.pop(99)
    grid.nodes[7] = impostor(problem, 1, MemoryStore(tmp_path / "stranger"))
    again = session_of(grid, INFERENCE, problem, timeout=1, file=file)
    with pytest.warns(RunWarning, match="node 7 is refused"):
        (reply,) = again.fit(broadcast, [1])
    assert isinstance(reply, ClientError)
    grid.nodes[5] = owner
    (reply,) = again.fit(broadcast, [1])
    assert reply.clients == (1,)
    file.write_text(file.read_text().replace("node", "nude", 1))
    with pytest.raises(RunError, match="nodes.json cannot be read .*delete it"):
        session_of(grid, INFERENCE, problem, file=file)


def test_a_reply_from_another_node_than_was_asked_is_refused(problem, broadcast, monkeypatch):
    grid = grid_of(problem, INFERENCE)
    session = session_of(grid, INFERENCE, problem)
    session.wait_for(3, 5)
    answer = grid.reply

    def forged(node, message):
        reply = answer(node, message)
        if node == 99:
            reply.metadata.__dict__["_src_node_id"] = 98
        return reply

    monkeypatch.setattr(grid, "reply", forged)
    replies = list(session.fit(broadcast, problem.clients))
    assert isinstance(replies[1], ClientError)
    assert replies[1].reason == "node 98 answered in its name, and is refused"


HELLOS = [
    {},
    {"client": [0]},
    {"client": {"a": 1}},
    {"client": True},
    {"client": "1"},
    {"client": 1.0},
    {"client": None},
    {"client": -1},
    {"client": 10**400},
    {"client": "x" * 10**6},
    {"client": 1, "key": "00"},
    {"client": 1, "key": [], "signature": {}},
    {"client": 1, "key": "ab" * 32, "signature": "cd" * 64},
    {"error": "/srv/hospital/data.npz: no such file"},
    [],
    None,
    "client",
]


@pytest.mark.parametrize("hello", HELLOS, ids=range(len(HELLOS)))
def test_a_malformed_hello_is_refused_by_the_nodes_name(problem, broadcast, hello):
    grid = grid_of(problem, INFERENCE)
    fields = pack({})
    fields["fields"] = ConfigRecord({"json": json.dumps(hello).encode()})
    grid.nodes[7] = Liar(impostor(problem, 1), IDENTIFY, fields)
    session = session_of(grid, INFERENCE, problem)
    with pytest.warns(RunWarning, match="node 7 is refused: ") as warned:
        assert session.wait_for(3, 5) == [0, 1, 2]
    (text,) = (str(one.message) for one in warned)
    assert len(text) < 700
    assert "/srv" not in text
    assert [reply.clients for reply in session.fit(broadcast, problem.clients)] == [
        (0,),
        (1,),
        (2,),
    ]


# A mute node delays nobody.


def test_a_mute_node_is_asked_once_and_delays_nobody(problem, broadcast, monkeypatch):
    monkeypatch.setattr(sessions, "IDENTIFY_TIMEOUT", 3.0)
    grid = grid_of(problem, INFERENCE)
    session = session_of(grid, INFERENCE, problem)
    session.wait_for(3, 5)
    grid.nodes[7] = None
    grid.mute.add(7)
    began = time.monotonic()
    for _ in range(3):
        assert len(list(session.fit(broadcast, problem.clients))) == 3
    assert time.monotonic() - began < 2.5
    assert asked(grid, 7) == [IDENTIFY]


def test_a_client_whose_node_stays_mute_is_waited_for_once_within_the_timeout(problem, broadcast):
    grid = grid_of(problem, INFERENCE)
    grid.mute.add(100)
    session = session_of(grid, INFERENCE, problem, timeout=1.0)
    session.wait_for(2, 5)
    began = time.monotonic()
    for _ in range(3):
        replies = list(session.fit(broadcast, problem.clients))
        assert replies[0].reason == "no connected node holds its data"
        assert [reply.clients for reply in replies[1:]] == [(1,), (2,)]
    assert time.monotonic() - began < 2.5
    grid.mute.clear()  # it says at last which client it holds
    list(session.fit(broadcast, [1]))
    (reply,) = session.fit(broadcast, [0])
    assert reply.clients == (0,)


def test_a_node_that_says_late_which_client_it_holds_takes_part_in_the_same_round(
    problem, broadcast, monkeypatch
):
    grid = grid_of(problem, INFERENCE)
    away = grid.nodes.pop(98)
    session = session_of(grid, INFERENCE, problem)
    session.wait_for(2, 5)
    grid.nodes[98], pulls, pull = away, [], grid.pull_messages
    grid.mute.add(98)

    def pulled(numbers):
        pulls.append(numbers)
        if len(pulls) == 5:
            grid.mute.clear()
        return pull(numbers)

    monkeypatch.setattr(grid, "pull_messages", pulled)
    assert [reply.clients for reply in session.fit(broadcast, problem.clients)] == [
        (0,),
        (1,),
        (2,),
    ]


# Sizes.


def array(data, dtype="float32", shape=(), stype="numpy.ndarray"):
    return Array(dtype=dtype, shape=tuple(shape), stype=stype, data=data)


def header(shape, dtype="<f4"):
    """Return an array file that claims a shape and has no data."""
    file = io.BytesIO()
    text = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, text)
    return file.getvalue()


def tensors(said, **more):
    said["tensors"] = ArrayRecord({**said.array_records["tensors"], **more})
    return said


def text(said, content):
    said["fields"] = ConfigRecord({"json": content})
    return said


LARGE = {
    "memory of 400 MB": (
        lambda said: tensors(said, **{"memory.x": Array(np.zeros((1, 10**8), np.float32))}),
        "its tensors have 400,",
    ),
    "20,000 statistics": (
        lambda said: tensors(said, **{f"statistics.{i}": Array(np.ones(1)) for i in range(20_000)}),
        "tensors; allowed: 4,096",
    ),
    "text of 10 MB": (
        lambda said: text(said, json.dumps({"error": "x" * 10**7}).encode()),
        "its text has 10,000,0",
    ),
    "error of 1 MB": (
        lambda said: text(said, json.dumps({"error": "x" * 10**6}).encode()),
        "xxx... (cut)",
    ),
    "header of 4 TB": (
        lambda said: tensors(said, **{"memory.x": array(header((1, 10**12)))}),
        "tensor memory.x claims 4,000,000,000,000 bytes, but 0 came",
    ),
    "negative header": (
        lambda said: tensors(said, **{"memory.x": array(header((-1, 4)))}),
        "tensor memory.x is not an array of numbers",
    ),
    "header of objects": (
        lambda said: tensors(said, **{"memory.x": array(header((1,), "|O"))}),
        "tensor memory.x is not an array of numbers",
    ),
    "name of 1 MB": (
        lambda said: tensors(said, **{"statistics." + "x" * 10**6: Array(np.ones(1))}),
        "allowed: 100 printable characters",
    ),
    "name of escapes": (
        lambda said: tensors(said, **{"statistics.\x1b[2J": Array(np.ones(1))}),
        "allowed: 100 printable characters",
    ),
    "text that is none": (lambda said: text(said, 3), "expected bytes of JSON, got int"),
    "deep text": (lambda said: text(said, b"[" * 10**5), "malformed reply (RecursionError"),
    "long integer": (
        lambda said: text(said, b'{"examples": ' + b"1" * 5000 + b"}"),
        "malformed reply (ValueError",
    ),
}


@pytest.mark.parametrize("how", LARGE)
def test_what_is_too_large_is_refused_by_its_limit_before_it_is_read(problem, broadcast, how):
    answer, expected = LARGE[how]
    honest = list(
        session_of(grid_of(problem, INFERENCE), INFERENCE, problem).fit(broadcast, [0, 2])
    )
    grid = grid_of(problem, INFERENCE)
    grid.nodes[99] = Liar(grid.nodes[99], FIT, answer)
    session = session_of(grid, INFERENCE, problem)
    session.wait_for(3, 5)
    replies = list(session.fit(broadcast, problem.clients))
    assert isinstance(replies[1], ClientError)
    assert expected in replies[1].reason
    assert len(replies[1].reason) < 600
    assert replies[1].reason.isprintable()
    assert not problems.difference([replies[0], replies[2]], honest)


# Replays, paths, silence.


def test_a_message_of_an_early_round_that_arrives_again_deletes_nothing(
    problem, broadcast, tmp_path
):
    store = MemoryStore(tmp_path / "1", depth=2)
    grid = grid_of(problem, INFERENCE, lambda client: store if client == 1 else None)
    session = session_of(grid, INFERENCE, problem)
    for number in range(4):
        (reply,) = session.fit(attrs.evolve(broadcast, round=number), [1])
        session.store(reply)
        if number == 0:
            early = next(reversed(grid.sent.values()))
    before = {path.name: path.read_bytes() for path in store.folder.glob("*.safetensors")}
    grid.nodes[99].answer(early)
    after = {path.name: path.read_bytes() for path in store.folder.glob("*.safetensors")}
    assert before.items() <= after.items()
    (reply,) = session.fit(attrs.evolve(broadcast, round=4), [1])
    assert isinstance(reply, LocalResult)


class Lost(Map):
    """Fail with the path of a file in the message, as libraries do."""

    name = "lost"
    said = "cannot open '{}' or {}: no such file"

    def fit(self, problem, broadcast, cohort):
        where = "/srv/hospital/patients.npz"
        raise FileNotFoundError(self.said.format(where, "C:\\Users\\ann\\x.npz"))


def test_a_nodes_folders_stay_there(problem, broadcast, tmp_path):
    lost = Lost(**attrs.asdict(INFERENCE, recurse=False))
    folder = tmp_path / "St Mary's" / "state"
    grid = grid_of(problem, lost)
    worker = ClientWorker(problem, INFERENCE, 10)
    grid.nodes[99] = Node(1, worker, MemoryStore(folder), private=(folder,))
    said = pack({"error": "ran in ~/secret/place.py, ../other/place.py, file:///a/b.c; took 3/4 s"})
    grid.nodes[98] = Liar(Node(2, worker), FIT, said)
    session = session_of(grid, lost, problem)
    session.restore({1: {"round": torch.tensor(8)}})
    first, second, third = (reply.reason for reply in session.fit(broadcast, problem.clients))
    assert first.startswith(
        "FileNotFoundError: cannot open 'patients.npz' or x.npz: no such file at "
    )
    assert second.startswith("its memory of round 8 cannot be read from 000008.safetensors")
    assert third == "ran in place.py, place.py, b.c; took 3/4 s"
    assert not any(word in first + second for word in ("srv", "Users", "Mary", str(tmp_path)))


NOTHING = [{}, {"evaluations": []}, {"evaluations": {}}, {"evaluations": None}, {"untested": True}]


@pytest.mark.parametrize("fields", NOTHING)
def test_an_evaluation_of_nothing_is_that_clients_failure(problem, broadcast, fields):
    grid = grid_of(problem, INFERENCE)
    grid.nodes[99] = Liar(grid.nodes[99], EVALUATE, pack(fields))
    replies = list(session_of(grid, INFERENCE, problem).evaluate(broadcast, problem.clients))
    assert [reply.client for reply in replies] == [0, 1, 2]
    assert isinstance(replies[1], ClientError)
    assert replies[1].stage == "evaluate"


def test_a_client_that_was_evaluated_cannot_say_that_it_has_no_samples(problem, broadcast):
    grid = grid_of(problem, INFERENCE)
    session = session_of(grid, INFERENCE, problem)
    assert len(list(session.evaluate(broadcast, problem.clients))) == 3
    grid.nodes[99] = Liar(grid.nodes[99], EVALUATE, pack({"evaluations": [], "untested": True}))
    replies = list(session.evaluate(broadcast, problem.clients))
    assert isinstance(replies[1], ClientError)
    assert "no evaluation on test samples, though there was one before" in replies[1].reason
    fresh = list(session_of(grid, INFERENCE, problem).evaluate(broadcast, problem.clients))
    assert [reply.client for reply in fresh] == [0, 2]  # it has none, as far as anybody knows


@pytest.mark.parametrize("stage", [FIT, EVALUATE, SURVEY, CALIBRATE])
def test_an_empty_reply_is_that_clients_failure(problem, broadcast, stage):
    grid = grid_of(problem, INFERENCE)
    grid.nodes[99] = Liar(grid.nodes[99], stage, RecordDict())
    session = session_of(grid, INFERENCE, problem)
    work = {"query.survey": "survey", "query.calibrate": "calibrate"}.get(stage)
    work = work or {FIT: "fit", EVALUATE: "evaluate"}[stage]
    with warnings.catch_warnings():
        replies = list(getattr(session, work)({} if work == "survey" else broadcast, [0, 1, 2]))
    assert isinstance(replies[1], ClientError)
    assert "malformed reply" in replies[1].reason
