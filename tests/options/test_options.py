import math
from typing import ClassVar, Optional

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bflcore import Component, OptionError, component, option
from bflcore.options import as_dict, build, changed, find_option, options_of, type_name
from bflcore.options.text import parse_spec, parse_text, spec_text

from .part import Part


def test_options_are_listed_with_type_default_help_and_what_is_allowed():
    listed = {one.name: one for one in options_of(Part)}
    assert listed["rate"].allowed == "above 0 and at most 1"
    assert listed["rule"].allowed == "adam | sgd"
    assert type_name(listed["widths"].type) == "tuple of int"
    assert type_name(listed["cap"].type) == "int or none"
    assert Part.summary() == "Do something."


def test_replacing_an_option_keeps_the_others_and_the_original():
    original = Part(steps=5)
    assert original.replace(rate=0.1) == Part(steps=5, rate=0.1)
    assert original == Part(steps=5)
    with pytest.raises(OptionError, match="rate"):
        original.replace(rate=2.0)


parts = st.builds(
    Part,
    rate=st.floats(0, 1, exclude_min=True),
    steps=st.integers(1, 9),
    rule=st.sampled_from(["adam", "sgd"]),
    widths=st.lists(st.integers(1, 300), max_size=3).map(tuple),
    cap=st.none() | st.integers(1, 5),
    random=st.booleans(),
)


@given(parts)
def test_storing_and_building_give_the_part_back(part):
    stored = as_dict(part)
    assert stored.pop("name") == "part"
    assert build(Part, stored, "part") == part


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 3.7),
        ("steps", "3"),
        ("steps", True),
        ("rate", "0.1"),
        ("rate", True),
        ("random", "False"),
        ("random", 0),
        ("rule", 3),
        ("widths", "100"),
        ("widths", [1.5]),
        ("cap", "none"),
        ("steps", None),
    ],
)
def test_values_of_the_wrong_type_are_refused_not_converted(key, value):
    with pytest.raises(OptionError, match=rf"part\.{key}: .* is not allowed"):
        build(Part, {key: value}, "part")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rate", 0.0),
        ("rate", 1.1),
        ("rate", math.nan),
        ("rate", math.inf),
        ("steps", 0),
        ("rule", "adma"),
        ("widths", [10, 0]),
        ("cap", 0),
    ],
)
def test_values_out_of_bounds_are_refused_with_what_is_allowed(key, value):
    with pytest.raises(OptionError, match=rf"part\.{key}: .* is not allowed; allowed: \S"):
        build(Part, {key: value}, "part")


def test_an_integer_too_large_for_a_float_is_refused():
    with pytest.raises(OptionError, match=r"part\.rate: 1000.* is not allowed; allowed: float"):
        build(Part, {"rate": 10**400}, "part")


@component
class Loose(Component):
    """Allow what is unusual."""

    kind = "part"
    name = "loose"
    table: ClassVar["Absent"] = {}  # noqa: F821 - as a type-checking import leaves it

    scale: float | None = option(1.0, "a scale")
    switches: tuple[bool, ...] = option((), "switches")
    cap: Optional[int] = option(None, "a cap")  # noqa: UP045 - the older spelling works too
    depth: int = option(2, "a depth")


def test_annotations_of_no_option_may_name_what_is_not_imported():
    assert [one.name for one in options_of(Loose)] == ["scale", "switches", "cap", "depth"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_float_without_bounds_must_still_be_finite(value):
    with pytest.raises(OptionError, match=r"loose\.scale: .* allowed: a finite number"):
        build(Loose, {"scale": value}, "loose")


def test_none_is_refused_where_storing_would_turn_it_into_the_default():
    with pytest.raises(OptionError, match=r"loose\.scale: None is not allowed; .*default 1\.0"):
        build(Loose, {"scale": None}, "loose")


def test_each_word_of_a_tuple_is_read_by_the_type_of_its_elements():
    assert parse_text(Loose, "switches", "false,on", "loose") == (False, True)
    with pytest.raises(OptionError, match="'maybe' is not allowed; allowed: bool"):
        parse_text(Loose, "switches", "on,maybe", "loose")


def test_an_optional_written_the_older_way_is_read_checked_and_named():
    assert parse_text(Loose, "cap", "3", "loose") == 3
    assert parse_text(Loose, "cap", "none", "loose") is None
    with pytest.raises(OptionError, match=r"3\.7 is not allowed; allowed: int or none"):
        build(Loose, {"cap": 3.7}, "loose")


@component
class Gaps(Component):
    """Divide, with a gap before the end."""

    kind = "partition"
    name = "gaps"

    most: int | None = option(None, "most")
    least: int = option(2, "least")


def test_a_spec_keeps_the_place_of_a_value_that_is_none():
    part = Gaps(least=5)
    assert parse_spec(Gaps, spec_text(part), "--partition") == part


def test_an_unknown_option_is_answered_with_the_nearest():
    with pytest.raises(OptionError, match=r"'part.stpes' \(did you mean part.steps\?\)"):
        build(Part, {"stpes": 3}, "part")


def test_options_cannot_be_changed():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Part().steps = 4


def test_flags_are_named_as_flags():
    with pytest.raises(OptionError, match=r"--steps: 0 is not allowed; allowed: at least 1"):
        build(Part, {"steps": 0}, "--")


@component
class Spelt(Component):
    """Descend."""

    kind = "part"
    name = "spelt"

    optimiser: str = option("adam", "update rule", aliases=("optimizer",))
    lr: float = option(0.1, "learning rate", above=0)


def test_an_alias_is_accepted_wherever_the_name_is_and_stored_under_the_name():
    expected = {"name": "spelt", "optimiser": "sgd", "lr": 0.1}
    assert as_dict(Spelt(optimizer="sgd")) == expected
    assert as_dict(build(Spelt, {"optimizer": "sgd"}, "spelt")) == expected
    assert parse_text(Spelt, "optimizer", "sgd", "spelt") == "sgd"
    with pytest.raises(OptionError, match="optimizer: optimiser is also given"):
        Spelt(optimizer="sgd", optimiser="sgd")


def test_a_misspelt_option_in_python_is_answered_with_the_nearest():
    with pytest.raises(OptionError, match=r"part spelt: 'optimser' \(did you mean optimiser\?\)"):
        Spelt(optimser="sgd")


def test_a_component_that_differs_in_some_options_keeps_the_others():
    one = Spelt(lr=0.5).replace(optimiser="sgd")
    assert one == Spelt(lr=0.5, optimiser="sgd")
    assert changed(one) == {"optimiser": "sgd", "lr": 0.5}
    assert changed(Spelt(lr=0.1)) == {}


@component
class Fewer(Part):
    """Ignores the cap."""

    name = "fewer"
    hides = ("cap",)


def test_a_hidden_option_is_neither_listed_nor_stored_nor_set_and_keeps_its_default():
    assert "cap" not in [one.name for one in options_of(Fewer)]
    assert "cap" in [one.name for one in options_of(Part)]
    part = Fewer(steps=4).replace(rate=0.1)
    assert (part.cap, part.steps, part.rate) == (None, 4, 0.1)
    assert "cap" not in as_dict(part)
    assert build(Fewer, {"steps": 4, "rate": 0.1}, "part") == part
    with pytest.raises(OptionError, match="unknown option of part fewer: 'cap'; allowed: random"):
        Fewer(cap=3)
    with pytest.raises(OptionError, match="unknown option 'part.cap'"):
        build(Fewer, {"cap": 3}, "part")
    with pytest.raises(OptionError, match="unknown option of part fewer: 'cap'"):
        part.replace(cap=3)


def test_an_option_of_a_component_without_options_is_refused_as_such():
    class Plain(Component):
        """Has no options."""

        kind = "model"
        name = "plain"

    with pytest.raises(
        OptionError, match=r"model.hidden: model plain has no options; leave it out"
    ):
        find_option(Plain, "hidden", "model")


def test_an_alias_is_not_inherited_with_another_name():
    from bflcore import Average

    @component
    class Mean(Average):
        """Average."""

        name = "mean"

    @component
    class Tuned(Average):
        """Average."""

    assert (Average.aliases, Mean.aliases, Tuned.aliases) == (("nwa",), (), ("nwa",))
