"""Aligned columns of text."""

from bflcore.cli.columns import columns


def test_cells_are_aligned_and_lines_end_where_their_text_ends():
    assert columns([("a", "bb", "end"), ("long", "c", "")]) == ["  a     bb  end", "  long  c"]


def test_no_rows_are_no_lines():
    assert columns([]) == []


def test_the_indentation_is_the_callers():
    assert columns([("a", "b")], indent="") == ["a  b"]
