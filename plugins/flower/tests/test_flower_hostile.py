"""Thousands of hostile replies over the wire: the client is named, and nobody else is touched."""

from __future__ import annotations

import json
import warnings
from functools import cache

import attrs
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bfl_flower.wire import CALIBRATE, EVALUATE, FIT, IDENTIFY, SURVEY
from bflcore import Average, ClientError, Equal, Fixed, Variational
from bflcore.engines.screening import screen_evaluations
from bflcore.errors import RunWarning
from bflcore.experiments.records import Records
from bflcore.experiments.surveys import calibrate, survey
from bflcore.problem.calibration.conformal import Conformal
from bflcore.rounds import Recipe, run_round
from bflcore.testing import problems

from .loopback import grid_of, session_of

pytestmark = [
    pytest.mark.usefixtures("identity"),
    pytest.mark.filterwarnings("ignore:Casting complex values"),
]

LIAR = 1  # the client that lies; it is node 99
STAGES = {
    "fit": FIT,
    "evaluate": EVALUATE,
    "survey": SURVEY,
    "calibrate": CALIBRATE,
    "hello": IDENTIFY,
}
INFERENCE = problems.build(Variational)
RECIPE = Recipe(INFERENCE, Average(), Equal(), Fixed())

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=10,
)
TEXTS = (
    st.binary(max_size=30)
    | st.sampled_from([b"[" * 10_000, b"9" * 5_000, b'{"a":' * 3_000, b"\xff" * 9, b"NaN"])
    | JSON.map(lambda value: json.dumps(value).encode())
)
DTYPES = [np.dtype(code) for code in "?bBhHiIlLqQefdgFD"] + [np.dtype(">f4"), np.dtype("U3")]
NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, np.nan, np.inf, -np.inf, 1e-45, 1e-30, 1e15, 1e38, -1e38)
LARGE = (2**63 - 1, -(2**63), 2**31, 10**15, 10**18)
KEYS = ("examples", "client", "key", "signature", "evaluations", "curves", "validation", "shared")
KEYS += ("error", "untested", "stored", "own", "number")


@st.composite
def arrays(draw, like=None):
    """Draw an array: of any form, or of the form of an honest one with other values in it."""
    if like is not None and draw(st.booleans()):
        found = like.numpy().copy()
        value = draw(st.sampled_from(NUMBERS if found.dtype.kind == "f" else (*LARGE, 0, -1)))
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            where = draw(st.integers(0, max(0, found.size - 1)))
            flat = found.reshape(-1)
            flat[where : where + 1 if draw(st.booleans()) else None] = np.array(value).astype(
                found.dtype
            )
        return Array(found)
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Array(np.full(shape, draw(st.sampled_from(NUMBERS))).astype(dtype))
    if draw(st.integers(0, 3)):
        return made
    cut = draw(st.integers(0, len(made.data)))
    data = draw(st.sampled_from([made.data[:cut], made.data + b"x", b"PK\x03\x04", b""]))
    stype = draw(st.sampled_from([made.stype, "torch.Tensor", ""]))
    claimed = tuple(draw(st.lists(st.integers(-2, 10**12), max_size=3)))
    return Array(dtype=draw(st.text(max_size=5)), shape=claimed, stype=stype, data=data)


@st.composite
def contents(draw, honest):
    """Draw the content of a reply from an honest one: other text, other tensors, or nothing."""
    content = RecordDict()
    if draw(st.integers(0, 30)) == 0:
        return content
    text = honest.config_records["fields"]["json"]
    fields = json.loads(text)
    how = draw(st.integers(0, 3))
    if how == 0:
        text = draw(TEXTS)
    elif how == 1:
        known = [*fields, *KEYS]
        for key in draw(st.lists(st.sampled_from(known), min_size=1, max_size=3)):
            fields[key] = draw(JSON)
        text = json.dumps(fields).encode()
    elif how == 2 and fields:
        del fields[draw(st.sampled_from(sorted(fields)))]
        text = json.dumps(fields).encode()
    content["fields"] = ConfigRecord({"json": text})
    found = dict(honest.array_records["tensors"])
    names = [*found, "x", "memory.x", "statistics.x", "posterior.x", "0.personal.x", "error"]
    for name in draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
        if draw(st.booleans()):
            found.pop(name, None)
        else:
            found[name] = draw(arrays(found.get(name)))
    content["tensors"] = ArrayRecord(found)
    return content


class Liar:
    """The node of a client that answers one kind of message as it likes."""

    def __init__(self, node, kind, content=None):
        self.node, self.kind, self.content, self.honest = node, kind, content, None

    def answer(self, message):
        found = self.node.answer(message)
        if message.metadata.message_type.removesuffix(".default") != self.kind:
            return found
        self.honest = found.content
        return Message(self.content, reply_to=message) if self.content is not None else found


@cache
def problem(stage):
    found = problems.separable(sharing="body", dtype=torch.float32)
    if stage == "survey":
        return attrs.evolve(found, standardise=True)
    return attrs.evolve(found, calibration=found.train, calibrators=(Conformal(scope="client"),))


@cache
def broadcast():
    return problems.first_broadcast(INFERENCE, problem("fit"))


def server(stage, liar=None, clients=(0, 1, 2)):
    """Run one stage on the server; return what it keeps, who replied, whom it names, the loss."""
    of = problem(stage)
    grid = grid_of(of, INFERENCE)
    liars = grid.nodes.pop(99)
    session = session_of(grid, INFERENCE, of)
    session.wait_for(2, 5)  # the others hold their clients before the liar connects
    grid.nodes[99] = liars
    if liar is not None:
        liar.node, grid.nodes[99] = liars, liar
    if stage in {"fit", "hello"}:
        done = run_round(RECIPE, session, broadcast(), clients, trust=30.0)
        return done.broadcast.pack(), done.replied, done.dropped, done.loss
    if stage == "evaluate":
        replies = screen_evaluations(list(session.evaluate(broadcast(), clients)), clients)
        record = Records("fedvi", list(range(3))).add_evaluation(1, 0.0, {}, replies, ())
        dropped = [reply for reply in replies if isinstance(reply, ClientError)]
        replied = sorted({r.client for r in replies if not isinstance(r, ClientError)})
        return {n: v for n, v in record.items() if "." in n}, replied, dropped, None
    asked = Only(session, clients)
    if stage == "survey":
        found = survey(INFERENCE, of, asked)
        return found.sums, None, found.dropped, None
    after, found = calibrate(of, asked, broadcast())
    return after.calibration, None, found.dropped, None


class Only:
    """A session that asks some of the clients."""

    def __init__(self, session, clients):
        self.session, self.clients = session, clients

    def survey(self, known, clients):
        return self.session.survey(known, [c for c in clients if c in self.clients])

    def calibrate(self, broadcast, clients):
        return self.session.calibrate(broadcast, [c for c in clients if c in self.clients])


@cache
def honest_reply(stage):
    liar = Liar(None, STAGES[stage])
    server(stage, liar)
    return liar.honest


@cache
def without_liar(stage):
    return server(stage, None, (0, 2))


@pytest.mark.parametrize("stage", STAGES)
@settings(
    max_examples=settings().max_examples // 5,  # five stages: 100 or 1,000 each
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(data=st.data())
def test_a_hostile_reply_is_refused_by_name_and_touches_nobody_else(stage, data, identity):
    content = data.draw(contents(honest_reply(stage)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunWarning)
        kept, replied, dropped, loss = server(stage, Liar(None, STAGES[stage], content))
    if not dropped:
        return  # what it sent is what an honest client may send
    assert {error.client for error in dropped} == {LIAR}
    assert all(error.reason.isprintable() and len(error.reason) < 2000 for error in dropped)
    expected, others, _, mean = without_liar(stage)
    assert replied == others
    assert kept == expected if stage == "evaluate" else not problems.difference(kept, expected)
    assert loss == mean
