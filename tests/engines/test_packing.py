"""Replies as bytes: what comes back is what was sent, and malformed bytes are an error."""

from __future__ import annotations

import os
import pickle

import attrs
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from bflcore import ClientError, Gaussian, Point
from bflcore.engines.packing import CLASSES, DTYPES, pack, unpack
from bflcore.messages import Answer, Evaluation, LocalResult, Personalised
from bflcore.testing.problems import gaussian

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def replies():
    """One reply of every kind, every field in use."""
    sums = {"examples": torch.tensor(3), "curve": torch.rand(2, 0, 3).double()}
    return [
        LocalResult(
            (4, 1),
            gaussian(2, 5, dtype=torch.float32),
            torch.tensor([3, 4]),
            torch.tensor([0.5, -0.0]),
            {"s": torch.eye(3)[:2].T},
            {"m": torch.tensor([[True], [False]]), "b": torch.ones(2, 1).bfloat16()},
        ),
        Evaluation(1, sums, None, {"λ": {0.1: sums, float("inf"): sums}}, True, {}, sums),
        Answer(7, sums),
        Personalised(2, None, sums),
        Personalised(2, {"m": torch.tensor(1.0)}),
        ClientError(3, "fit", "why\nnot", "a trace"),
    ]


def plain(value):
    """Return everything in a value as text and bytes."""
    if isinstance(value, torch.Tensor):
        whole = value.contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), bytes(whole.tolist())
    if isinstance(value, ClientError):
        return value.client, value.stage, value.reason, value.trace
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if attrs.has(type(value)):
        fields = attrs.fields(type(value))
        return type(value), {field.name: plain(getattr(value, field.name)) for field in fields}
    return value


def test_every_reply_comes_back_to_the_bit():
    sent = replies()
    found = unpack(bytes(pack(sent)), Gaussian)
    assert [plain(reply) for reply in found] == [plain(reply) for reply in sent]
    assert {type(reply).__name__ for reply in sent} == set(CLASSES)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_every_kind_of_number_comes_back_in_memory_of_its_own(dtype, shape):
    tensor = (torch.rand(shape) * 9).to(dtype)
    (found,) = unpack(pack([Answer(0, {"t": tensor})]))
    assert plain(found.sums["t"]) == plain(tensor)
    assert found.sums["t"].data_ptr() % 64 == 0  # as torch's own: the last bits depend on it
    found.sums["t"].zero_()  # it can be written to


def test_a_posterior_of_another_family_is_its_clients_error():
    one, other = unpack(pack(replies()[:1]), Point)
    assert [one.client, other.client] == [4, 1]
    assert one.reason == "posterior is Gaussian, not Point"


class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


@pytest.mark.parametrize("wrong", [Trap(), {1}, b"text", 1j, torch.nn.Parameter(torch.ones(1))])
def test_what_is_no_plain_value_cannot_be_sent(wrong):
    with pytest.raises(TypeError, match="cannot be sent"):
        pack([Answer(0, {"t": wrong})])
    with pytest.raises(TypeError, match="cannot be sent"):
        pack([attrs.evolve(replies()[3], client=wrong)])


ANSWER = b'[{"class": "Answer", "fields": {"items": [["client", 0], ["sums", {"dtype": %b}]]}}]'


@pytest.mark.parametrize(
    "text",
    [
        b"[]]",
        b"null",
        b"[null]",
        b'[{"class": "Trap", "fields": {"items": []}}]',
        b'[{"class": "Answer", "fields": {"items": [["client", 0]]}}]',
        ANSWER % b'"float32", "shape": [1000000000000]',
        ANSWER % b'"float32", "shape": [-1]',
        ANSWER % b'"save", "shape": []',
        b"[" * 100_000,
        b"9" * 10_000,
    ],
)
def test_a_malformed_message_is_one_error(text):
    with pytest.raises(ValueError, match=r"\w+: "):
        unpack(len(text).to_bytes(8, "little") + text, Gaussian)


@settings(max_examples=10_000 if THOROUGH else 500)
@given(st.data())
def test_a_damaged_message_is_read_or_refused_and_nothing_else(data):
    message = pack(replies())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del message[data.draw(st.integers(0, len(message) - 1)) :]
    try:
        found = unpack(message, Gaussian)
    except ValueError:
        return
    assert all(type(reply).__name__ in CLASSES for reply in found)


def test_a_pickle_is_not_a_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for message in (pickle.dumps(Trap()), b"", b"\xff" * 99):
        with pytest.raises(ValueError):  # noqa: PT011 - whatever json says
            unpack(message)
    assert not list(tmp_path.iterdir())
