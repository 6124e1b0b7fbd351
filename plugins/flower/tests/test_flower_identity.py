"""A node's key: made once, private, and needed for every proof."""

from __future__ import annotations

import pytest

from bfl_flower.identity import FILE, proven_key, read_key, signed
from bfl_flower.limits import MalformedError
from bflcore.errors import RunError


def test_a_key_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    first = read_key(tmp_path / "state")
    assert read_key(tmp_path / "state").private_bytes_raw() == first.private_bytes_raw()
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o077 == 0
    assert read_key(tmp_path / "other").private_bytes_raw() != first.private_bytes_raw()


def test_a_proof_holds_for_one_client_and_one_number(tmp_path):
    said = {"client": 3, **signed(read_key(tmp_path), 3, "abc")}
    assert proven_key(said, "abc") == said["key"]
    assert proven_key({"client": 3}, "abc") == ""
    for wrong in (said | {"client": 4}, said | {"signature": "00" * 64}, said | {"key": "11" * 32}):
        with pytest.raises(MalformedError, match="its signature is not that of the key it gives"):
            proven_key(wrong, "abc")
    with pytest.raises(MalformedError):
        proven_key(said, "abd")


@pytest.mark.parametrize("content", ["", "xyz", "00", "zz" * 32])
def test_a_damaged_key_is_one_line_that_says_what_to_do(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(
        RunError, match="cannot be used as this node's key .it is damaged.; restore"
    ):
        read_key(tmp_path)
