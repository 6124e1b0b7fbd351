"""What travels comes back as it was; what is malformed is the client's error, whatever it is."""

from __future__ import annotations

import json
import pickle

import attrs
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from bfl_flower.wire import (
    CALIBRATE,
    EVALUATE,
    FIT,
    PERSONALISE,
    MalformedError,
    Task,
    pack,
    unpack,
)
from bflcore import (
    Average,
    Broadcast,
    ClientError,
    Equal,
    Fixed,
    Gaussian,
    Layout,
    LocalResult,
    LowRankGaussian,
    Point,
    Variational,
)
from bflcore.messages import Answer, Evaluation, Personalised
from bflcore.rounds import Recipe, run_round
from bflcore.testing import problems
from bflcore.testing.problems import Replies

PARAMETERS = 4


def gaussian(clients=0, shift=0.0):
    shape = (clients, PARAMETERS) if clients else (PARAMETERS,)
    return Gaussian(torch.full(shape, 1.0 + shift), torch.full(shape, 0.5 + shift))


def broadcast():
    return Broadcast(3, gaussian(), gaussian(shift=1.0), {"noise": torch.tensor(0.25)})


def task(stage=FIT):
    return Task(stage, 2, broadcast(), {"personal.mean": torch.zeros(0), "age": torch.tensor(7)})


def result():
    return LocalResult(
        (2,),
        gaussian(1, 0.25),
        torch.tensor([11]),
        torch.tensor([0.75]),
        {"gradient": torch.ones(1, 3, 2)},
        {"age": torch.tensor([8])},
    )


def answered(reply, stage=FIT):
    of = task(stage)
    return of.read(of.answer([reply]))[0]


def test_a_question_comes_back_as_it_was():
    back = Task.unpack(FIT, task().pack(), Gaussian, torch.device("cpu"))
    assert (back.client, back.stage, back.broadcast.round) == (2, FIT, 3)
    assert not problems.difference((back.broadcast, back.memory), (broadcast(), task().memory))


def test_a_prior_that_is_the_start_travels_once():
    start = gaussian()
    content = Task(FIT, 0, Broadcast(0, start, start), {}).pack()
    assert sorted(content.array_records["tensors"]) == ["start.mean", "start.variance"]
    back = Task.unpack(FIT, content, Gaussian, torch.device("cpu"))
    assert back.broadcast.prior is back.broadcast.start


def test_a_result_comes_back_as_it_was():
    assert not problems.difference(answered(result()), result())


def test_the_basis_of_a_family_does_not_travel_back():
    layout = Layout.of(torch.nn.Linear(2, 2))
    start, sent = (
        LowRankGaussian.arbitrary(layout, 1, problems.generator(seed)) for seed in (0, 1)
    )
    of = Task(FIT, 2, Broadcast(3, start[0], start[0]), {})
    one = attrs.evolve(result(), posterior=sent)
    content = of.answer([one])
    assert "posterior.basis" not in content.array_records["tensors"]
    assert not problems.difference(of.read(content)[0], one)


@pytest.mark.parametrize("shared", [None, {"examples": torch.tensor(3), "nll": torch.tensor(2.0)}])
def test_an_evaluation_comes_back_as_it_was(shared):
    sums = {"examples": torch.tensor(3), "bins": torch.arange(10.0)}
    found = Evaluation(2, sums, shared, {"lambda": {0.0: sums, 0.1: sums}})
    assert not problems.difference(answered(found, EVALUATE), found)


def test_calibrated_sums_come_back_and_so_does_an_answer():
    sums = {"examples": torch.tensor(3), "nll": torch.tensor(2.0)}
    found = Evaluation(2, sums, None, calibrated=sums | {"mean.set_size90": torch.tensor(4.0)})
    assert not problems.difference(answered(found, EVALUATE), found)
    answer = Answer(2, {"conformal.scores": torch.arange(4).reshape(1, 4)})
    assert not problems.difference(answered(answer, CALIBRATE), answer)
    error = answered(ClientError(2, "calibrate", "no"), CALIBRATE)
    assert (error.stage, error.reason) == ("calibrate", "no")


def test_evaluations_on_test_and_on_validation_samples_come_back_together():
    sums = [{"examples": torch.tensor(n), "nll": torch.tensor(1.0 / n)} for n in (3, 4, 5)]
    found = [
        Evaluation(2, sums[0], sums[1], {"lambda": {0.5: sums[2]}}, ood=sums[2]),
        Evaluation(2, sums[1], None, validation=True),
    ]
    of = task(EVALUATE)
    back = of.read(of.answer(found))
    assert not problems.difference(back, found)
    assert [evaluation.validation for evaluation in back] == [False, True]
    assert [evaluation.ood is None for evaluation in back] == [False, True]


@pytest.mark.parametrize("memory", [None, {"personal.mean": torch.arange(3.0)}])
def test_the_memory_of_a_client_that_is_ready_comes_back_as_it_was(memory):
    found = answered(Personalised(2, memory), PERSONALISE)
    assert (found.client, found.memory is None) == (2, memory is None)
    assert not problems.difference(found.memory, memory)


def test_a_model_that_stays_on_its_node_is_no_reply_and_rubbish_is_an_error():
    of = task(PERSONALISE)
    assert of.read(of.answer([])) == []
    (error,) = of.read(RecordDict())
    assert (error.client, error.stage) == (2, "personalise")
    back = answered(ClientError(2, "personalise", "out of luck"), PERSONALISE)
    assert (back.stage, back.reason) == ("personalise", "out of luck")


def test_an_error_comes_back_with_its_client_and_stage():
    back = answered(ClientError(2, "evaluate", "out of luck"), EVALUATE)
    assert (back.client, back.stage, back.reason) == (2, "evaluate", "out of luck")


def test_a_client_with_nothing_to_evaluate_says_nothing():
    of = task(EVALUATE)
    assert of.read(of.answer([])) == []


def array(data=b"", dtype="float32", shape=(), stype="numpy.ndarray"):
    return Array(dtype=dtype, shape=tuple(shape), stype=stype, data=data)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a reply was unpickled",)


def npy(objects):
    """An array file that holds pickles, as numpy writes them."""
    import io

    buffer = io.BytesIO()
    np.save(buffer, np.array([objects], dtype=object), allow_pickle=True)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data", [pickle.dumps(Bomb()), npy(Bomb()), b"", b"\x93NUMPY\x01\x00", b"not an array"]
)
def test_pickles_and_fragments_are_refused_unread(data):
    content = task().answer([result()])
    arrays = dict(content.array_records["tensors"]) | {"loss": array(data)}
    content["tensors"] = ArrayRecord(arrays)
    (back,) = task().read(content)
    assert isinstance(back, ClientError)
    assert back.client == 2
    assert "malformed reply" in back.reason


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"examples": "many"}'])
def test_malformed_texts_are_refused(text):
    content = task().answer([result()])
    content["fields"] = ConfigRecord({"json": text})
    (back,) = task().read(content)
    assert isinstance(back, ClientError)


def test_an_empty_message_is_refused():
    with pytest.raises(MalformedError):
        unpack(RecordDict())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
FIELDS = ("posterior.mean", "posterior.variance", "loss", "statistics.gradient", "memory.age", "x")
DTYPES = (np.float32, np.float64, np.int64, np.bool_, np.complex64, np.float16)
VALUES = (0.5, -1.0, float("nan"), float("inf"), 1e-45, 1e38, 0.0)


@st.composite
def replies(draw):
    """Draw a reply in which at least one thing differs from a proper one."""
    fields = draw(st.just({"examples": 11}) | st.dictionaries(st.sampled_from(["examples"]), JSON))
    proper = task().answer([result()]).array_records["tensors"]
    arrays = dict(proper)
    for name in draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3, unique=True)):
        if draw(st.booleans()):
            arrays.pop(name, None)
            continue
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        dtype, value = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(VALUES))
        with np.errstate(all="ignore"):
            arrays[name] = Array(np.full(shape, value).astype(dtype))
        if draw(st.integers(0, 4)) == 0:
            kept = arrays[name]
            end = draw(st.integers(0, len(kept.data)))
            arrays[name] = array(kept.data[:end], kept.dtype, kept.shape, kept.stype)
    content = pack({})
    content["fields"] = ConfigRecord({"json": json.dumps(fields).encode()})
    content["tensors"] = ArrayRecord(arrays)
    return content


@pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning")
@given(replies())
def test_no_reply_whatever_it_holds_breaks_the_server_or_its_posterior(content):
    recipe = Recipe(Variational(), Average(), Equal(), Fixed())
    honest = LocalResult((1,), gaussian(1), torch.tensor([5]), torch.tensor([1.0]))
    session = Replies(honest, *task().read(content))
    fused = run_round(recipe, session, broadcast(), [1, 2])
    if fused.replied == (1,):
        assert [error.client for error in fused.dropped] == [2]
        assert torch.equal(fused.broadcast.start.mean, gaussian().mean)
    assert bool(fused.broadcast.start.mean.isfinite().all())
    assert bool((fused.broadcast.start.variance >= 0).all())


def test_a_family_that_has_other_fields_is_refused():
    of = Task(FIT, 2, Broadcast(0, Point(torch.zeros(4)), Point(torch.zeros(4))), {})
    wrong = LocalResult((2,), Point(torch.zeros(1, 4)), torch.tensor([1]), torch.tensor([0.0]))
    assert isinstance(of.read(of.answer([wrong]))[0], LocalResult)
    assert isinstance(task().read(of.answer([wrong]))[0], ClientError)
