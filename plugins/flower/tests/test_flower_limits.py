"""What is shown of a node's text, and what its arrays may claim."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array
from hypothesis import given
from hypothesis import strategies as st

from bfl_flower.limits import SHOWN, MalformedError, check_size, room_for, shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cannot open /srv/data/x.npz: gone", "cannot open x.npz: gone"),
        ("'/srv/x.npz' and (~/y.npz)", "'x.npz' and (y.npz)"),
        ("C:\\Users\\ann\\x.npz, D:/y.npz", "x.npz, y.npz"),
        ("KeyError: 'mean' at mine/rule.py:42", "KeyError: 'mean' at mine/rule.py:42"),
        ("in a/b/rule.py", "in rule.py"),
        ("either/or, 3/4 of N/A, 1 / 2", "either/or, 3/4 of N/A, 1 / 2"),
        ("two\nlines\tand \x1b[31mred\x1b[0m \u202eRTL", "two lines and [31mred [0m RTL"),
        ("[bold]as it is[/bold]", "[bold]as it is[/bold]"),
        ("", ""),
    ],
)
def test_a_text_is_one_line_without_folders_or_control_characters(text, expected):
    assert shown(text) == expected


def test_a_known_path_may_have_spaces(tmp_path):
    folder = tmp_path / "St Mary's" / "client 0.state"
    text = f"{folder / '000008.safetensors'} is not in {folder}"
    assert shown(text, (folder,)) == "client 0.state/000008.safetensors is not in client 0.state"
    assert shown("data.npz is malformed", (Path("data.npz"),)) == "data.npz is malformed"


@given(st.text(max_size=2000))
def test_whatever_a_node_says_is_a_short_printable_line(text):
    line = shown(text)
    assert len(line) <= SHOWN + len("... (cut)")
    assert line.isprintable()
    assert "/srv/" not in shown(f"{text[:50]} /srv/secret/{text[50:60]}")


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.bool_, np.complex64])
def test_arrays_of_every_form_pass(shape, dtype):
    arrays = {
        "one": Array(np.zeros(shape, dtype)),
        "two": Array(np.asfortranarray(np.ones((2, 2)))),
    }
    check_size(b"{}", arrays, math.inf)
    check_size(b"{}", arrays, room_for(0))


def test_the_room_of_a_reply_grows_with_what_was_sent():
    arrays = {"memory": Array(np.zeros(20_000_000, np.float32))}
    check_size(b"{}", arrays, room_for(400_000))
    with pytest.raises(MalformedError, match="bytes; allowed: 67,108,864, 256 times what was sent"):
        check_size(b"{}", arrays, room_for(0))
