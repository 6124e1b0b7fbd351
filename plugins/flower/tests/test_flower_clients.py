"""Which node holds which client: the first that claims it, and afterwards only the same one."""

from __future__ import annotations

import pytest

from bfl_flower.clients import ClientRegistry
from bflcore.errors import RunError


def registry(file=None):
    found = ClientRegistry(range(3), file)
    found.connected = {10, 11, 12, 20}
    return found


def test_the_first_node_that_claims_a_client_holds_it():
    found = registry()
    assert found.claim(11, 1, "") == ""
    assert "which node 11 holds" in found.claim(12, 1, "")
    assert found.claim(11, 1, "") == ""
    assert found.nodes == {1: 11}


def test_another_node_takes_its_place_with_the_same_key_only():
    found = registry()
    found.claim(11, 1, "key")
    assert "cannot prove" in found.claim(12, 1, "other")
    assert "node 12, which claims to be it, is refused" in found.absence(1)
    assert found.claim(20, 1, "key") == ""
    assert found.nodes == {1: 20}
    assert found.absence(1) == "no connected node holds its data"


def test_a_node_without_a_key_is_replaced_by_nobody():
    found = registry()
    found.claim(11, 1, "")
    assert found.claim(12, 1, "") != ""
    assert found.claim(12, 1, "key") != ""


def test_a_node_holds_one_client():
    found = registry()
    found.claim(11, 1, "key")
    assert found.claim(11, 2, "key") == "it claims client 2, but holds another one"
    assert found.nodes == {1: 11}


def test_a_node_that_is_away_keeps_its_client():
    found = registry()
    found.claim(11, 1, "")
    found.connected = {12}
    assert found.nodes == {}
    assert found.claim(12, 1, "") != ""
    found.connected = {11, 12}
    assert found.nodes == {1: 11}


def test_holders_outlive_the_session_and_a_damaged_file_is_one_line(tmp_path):
    file = tmp_path / "nodes.json"
    registry(file).claim(11, 1, "key")
    again = registry(file)
    assert again.nodes == {1: 11}
    assert "cannot prove" in again.claim(12, 1, "other")
    for content in ("", "{}", "[]", '{"nodes": []}', file.read_text().replace("11", "12")):
        file.write_text(content)
        with pytest.raises(
            RunError, match="nodes.json cannot be read .*; restore it; or delete it"
        ):
            registry(file)
