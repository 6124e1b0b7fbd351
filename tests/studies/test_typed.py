from collections.abc import Mapping
from typing import Any, Literal

import attrs
import pytest

from bflcore.errors import OptionError
from bflcore.studies.typed import build, tables, tables_by_name


@attrs.frozen
class Inner:
    number: int


@attrs.frozen
class Outer:
    name: str
    share: float = 1.0
    on: bool = False
    way: Literal["up", "down"] = "up"
    words: tuple[str, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    inner: Inner | int | None = None
    flags: Mapping[str, Any] = {}
    numbers: Mapping[str, float | None] = {}


GIVEN = {
    "name": "a",
    "share": 2,
    "way": "down",
    "words": ["x"],
    "pair": [1, 2.5],
    "inner": {"number": 3},
    "flags": {"any": [1]},
    "numbers": {"one": 1.0, "none": None},
}


def test_values_of_a_table_become_a_class_with_tuples_and_classes_within():
    found = build(Outer, GIVEN, "here")
    assert (found.words, found.pair, found.inner) == (("x",), (1, 2.5), Inner(3))
    assert build(Outer, {"name": "a", "inner": 3}, "here").inner == 3


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"name": 3}, "here: name: 3 is not allowed; allowed: text"),
        ({"share": "1"}, "here: share: '1' is not allowed; allowed: a number"),
        ({"share": True}, "here: share: True is not allowed"),
        ({"on": 1}, "here: on: 1 is not allowed; allowed: true or false"),
        ({"way": "Up"}, "here: way: 'Up' is not allowed; allowed: up, down"),
        ({"words": "xyz"}, "here: words: 'xyz' is not allowed; allowed: a list of text"),
        ({"words": [1]}, r"here: words: \(1,\) is not allowed"),
        ({"pair": [1]}, "here: pair: .* allowed: a list of 2 times a number"),
        ({"inner": {"number": 0.5}}, "here: inner: number: 0.5 is not .*: a whole number"),
        ({"inner": "x"}, "here: inner: 'x' is not allowed; allowed: a table or a whole number"),
        ({"flags": 3}, "here: flags: 3 is not allowed; allowed: a table"),
        ({"numbers": {"one": "x"}}, "here: numbers: .* is not allowed; allowed: a table"),
        ({"wrods": ["x"]}, "unknown key of a outer in here 'wrods' .did you mean words"),
    ],
)
def test_another_type_or_key_is_refused_in_one_line(changed, error):
    with pytest.raises(OptionError, match=error) as caught:
        build(Outer, GIVEN | changed, "here")
    assert "\n" not in str(caught.value)


def test_a_missing_key_and_what_is_not_a_table_are_refused():
    with pytest.raises(OptionError, match="here: a inner lacks the key number; add it"):
        build(Inner, {}, "here")
    with pytest.raises(OptionError, match="here: 3 is not allowed; allowed: a table with number"):
        build(Inner, 3, "here")


def test_tables_of_a_file_are_found_or_refused():
    values = {"rows": [{"a": 1}], "metrics": {"b": {"c": 2}}, "other": 3, "more": {"b": 1}}
    assert tables(values, "rows", "here") == [{"a": 1}]
    assert tables(values, "none", "here") == []
    assert tables_by_name(values, "metrics", "here") == {"b": {"c": 2}}
    for key in ("metrics", "other"):
        with pytest.raises(OptionError, match=rf"here: {key} is .*; write \[\[{key}\]\]"):
            tables(values, key, "here")
    for key in ("rows", "other", "more"):
        with pytest.raises(OptionError, match=rf"here: {key} does .*; write \[{key}.NAME\]"):
            tables_by_name(values, key, "here")
