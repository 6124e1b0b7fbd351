"""Options as text: on the command line, and in a partition's name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bflcore import Component, OptionError, component, option
from bflcore.options import options_of
from bflcore.options.text import parse_spec, parse_text, spec_text, value_text

from .part import Part

parts = st.builds(
    Part,
    rate=st.floats(0, 1, exclude_min=True),
    steps=st.integers(1, 9),
    rule=st.sampled_from(["adam", "sgd"]),
    widths=st.lists(st.integers(1, 300), max_size=3).map(tuple),
    cap=st.none() | st.integers(1, 5),
    random=st.booleans(),
)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("rate", "0.25", 0.25),
        ("steps", "4", 4),
        ("random", "yes", True),
        ("random", "off", False),
        ("widths", "64,32", (64, 32)),
        ("widths", "", ()),
        ("cap", "none", None),
        ("cap", "2", 2),
    ],
)
def test_text_is_read_by_the_options_type(key, text, value):
    assert parse_text(Part, key, text, "part") == value


@pytest.mark.parametrize(("key", "text"), [("steps", "4.5"), ("rate", "x"), ("random", "maybe")])
def test_text_of_the_wrong_type_is_refused(key, text):
    with pytest.raises(OptionError, match=f"part.{key}: {text!r} is not allowed"):
        parse_text(Part, key, text, "part")


@component
class Labels(Component):
    """Divide."""

    kind = "partition"
    name = "labels"

    k: int = option(2, "classes", at_least=1)
    a: float = option(0.5, "spread", above=0)
    random: bool = option(False, "draw")


def test_a_spec_fills_options_in_order_and_switches_by_name():
    assert parse_spec(Labels, "labels:5,random", "--partition") == Labels(k=5, random=True)
    assert parse_spec(Labels, "labels", "--partition") == Labels()
    with pytest.raises(OptionError, match="a value too many"):
        parse_spec(Labels, "labels:5,0.1,7", "--partition")
    with pytest.raises(OptionError, match="'x' is not allowed; allowed: int"):
        parse_spec(Labels, "labels:x", "--partition")


@given(st.integers(1, 9), st.floats(0.01, 9), st.booleans())
def test_the_text_of_a_spec_is_read_back(k, a, random):
    part = Labels(k=k, a=a, random=random)
    assert parse_spec(Labels, spec_text(part), "--partition") == part


@given(parts)
def test_the_text_of_a_value_is_read_back(part):
    for declared in options_of(Part):
        value = getattr(part, declared.name)
        assert parse_text(Part, declared.name, value_text(value), "part") == value
