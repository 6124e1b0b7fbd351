"""Digests in files: whatever changes a value is noticed, and the file and the place are named."""

from __future__ import annotations

import json
import random

import pytest
import torch

from bflcore.errors import RunError
from bflcore.experiments.integrity import (
    add_digest,
    check_digest,
    digest_of,
    parse_line,
    read_json,
    read_lines,
    tensor_digest,
    write_json,
)

VALUE = {"round": 3, "acc": {"mean": 0.1 + 0.2, "who": ["a", None, True]}, "nan": float("nan")}


def test_what_was_written_is_read_back_without_the_digest(tmp_path):
    write_json(tmp_path / "a.json", {**VALUE, 1: "a key that is no text"})
    found = read_json(tmp_path / "a.json")
    assert found["acc"] == VALUE["acc"]
    assert found["1"] == "a key that is no text"
    assert "digest" not in found


def test_every_changed_digit_is_noticed_but_not_a_changed_time(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"seconds": {"total": 1.5}, "accuracy": 0.25})
    text = path.read_text()
    path.write_text(text.replace("1.5", "2.5"))
    assert read_json(path)["seconds"]["total"] == 2.5
    path.write_text(text.replace("0.25", "0.26"))
    with pytest.raises(RunError, match=r"a.json cannot be read \(its content does not match"):
        read_json(path)


def test_results_that_are_equal_have_equal_digests_whatever_the_time():
    one, other = (add_digest({"seconds": s, "accuracy": 0.25}) for s in (1, 2))
    assert one["digest"] == other["digest"]
    assert one["digest"] != add_digest({"accuracy": 0.26})["digest"]


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "{}", '{"digest": 3}', "[" * 100_000])
def test_other_content_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RunError, match="a.json cannot be read") as error:
        read_json(tmp_path / "a.json", "go home")
    assert str(error.value).endswith("; go home")


def lines_of(values):
    digest, lines = "", []
    for value in values:
        line = add_digest(value, digest)
        digest = line["digest"]
        lines.append(json.dumps(line))
    return lines


def test_lines_are_chained(tmp_path):
    path, lines = tmp_path / "a.jsonl", lines_of({"round": n} for n in range(4))
    path.write_text("\n".join(lines) + "\n")
    assert [value["round"] for value in read_lines(path)] == [0, 1, 2, 3]
    for other in (
        [lines[0], lines[2], lines[3]],  # one is lost
        [lines[0], lines[2], lines[1], lines[3]],  # two are exchanged
        [lines[0], lines[0]],  # one is there twice
        [lines[0], lines[1].replace("1", "7", 1)],
    ):
        path.write_text("\n".join(other) + "\n")
        with pytest.raises(RunError, match="line 2 cannot be read"):
            read_lines(path)
    value, digest = parse_line(lines[0], "")
    assert parse_line(lines[1], digest)[0] == {"round": 1}
    assert value == {"round": 0}


def test_any_changed_byte_of_a_tensor_or_its_form_changes_the_digest():
    draw = random.Random(0)
    tensors = {"a": torch.randn(3, 4), "b": torch.tensor(True), "c": torch.arange(5)}
    known = tensor_digest("{}", tensors)
    assert tensor_digest("{}", {name: t.clone() for name, t in tensors.items()}) == known
    others = [
        tensor_digest("{ }", tensors),
        tensor_digest("{}", {**tensors, "a": tensors["a"].reshape(4, 3)}),
        tensor_digest("{}", {**tensors, "a": tensors["a"].view(torch.int32)}),
        tensor_digest("{}", {"A" if name == "a" else name: t for name, t in tensors.items()}),
    ]
    for _ in range(50):
        changed = tensors["a"].clone()
        flat = changed.reshape(-1).view(torch.uint8)
        flat[draw.randrange(len(flat))] ^= 1 << draw.randrange(8)
        others.append(tensor_digest("{}", {**tensors, "a": changed}))
    assert known not in others


def test_a_digest_that_is_missing_or_wrong_is_told_apart():
    with pytest.raises(ValueError, match="has no digest"):
        check_digest(None, digest_of(1))
    with pytest.raises(ValueError, match="does not match"):
        check_digest("x", digest_of(1))
    check_digest(digest_of(1), digest_of(1))


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(RunError, match="a.json cannot be written"):
        write_json(tmp_path / "absent" / "a.json", {})


def test_a_tensor_has_one_digest_however_it_lies_in_memory():
    whole = torch.arange(12.0).reshape(3, 4)
    assert tensor_digest("", {"a": whole.T}) == tensor_digest("", {"a": whole.T.contiguous()})
    for size in (0, 1):  # contiguous, whatever the stride
        strange = torch.zeros(1).as_strided((size,), (0,))
        assert tensor_digest("", {"a": strange}) == tensor_digest("", {"a": torch.zeros(size)})
