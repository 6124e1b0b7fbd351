"""A grid is every combination; what cannot be read is refused in one line."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bflcore import OptionError
from bflcore.studies.cells import check_cells
from bflcore.studies.grids import Axis, Entry, axis_of, cells_of, parse_axis, read_list

words = st.text("abc019.:-", min_size=1, max_size=6)
keys = ["inference.kl_weight", "model.hidden", "aggregator", "hyper"]


@given(st.sampled_from(keys), st.lists(words, min_size=1, max_size=5, unique=True))
def test_values_are_read_back_from_the_text_that_joins_them(key, values):
    assert parse_axis(f"{key}={','.join(values)}") == Axis(key, tuple(values))
    assert parse_axis(f"{key}={' ; '.join(values)};") == Axis(key, tuple(values))


@given(st.lists(st.lists(words, min_size=2, max_size=3), min_size=1, max_size=4))
def test_values_with_commas_are_separated_by_semicolons(values):
    texts = list(dict.fromkeys(",".join(one) for one in values))
    assert parse_axis(f"model.hidden={';'.join(texts)};").values == tuple(texts)


def test_settings_have_the_type_of_their_flag():
    assert parse_axis("--local-epochs=1,2") == Axis("local_epochs", ("1", "2"))
    assert parse_axis("rounds=10,20").values == (10, 20)
    assert parse_axis("validation-fraction=0,0.5") == Axis("validation_fraction", (0.0, 0.5))
    assert parse_axis("partition=iid;dirichlet:0.5").values == ("iid", "dirichlet:0.5")
    assert parse_axis("train-per-class=none,5").values == (None, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds", "'rounds' is not allowed; allowed: KEY=A,B"),
        ("=1,2", "'=1,2' is not allowed"),
        ("rounds=", "has an empty value"),
        ("rounds=1,,2", "has an empty value"),
        ("rounds=1;;2", "has an empty value"),
        ("rounds=1,x", "--grid: rounds: 'x' is not allowed; allowed: int"),
        ("rounds=1,2,1", "rounds has the value 1 twice"),
        ("ruonds=1", "unknown flag of --grid 'ruonds' .did you mean rounds"),
        ("infrence.lr=1", "unknown part of --grid 'infrence' .did you mean inference"),
        ("seed=1,2", "seed is not a setting of a cell; use --seeds"),
        ("out=a,b", "out is not a setting of a cell"),
    ],
)
def test_a_grid_that_cannot_be_meant_is_refused(text, message):
    with pytest.raises(OptionError, match=message):
        parse_axis(text)


def test_an_axis_needs_a_list_of_values():
    for values in ((), "abc"):
        with pytest.raises(OptionError, match="needs at least one value, in a list"):
            axis_of("rounds", values)


methods = st.lists(st.sampled_from(["fedavg", "bpfed", "fedvi"]), min_size=1, unique=True)
axes = st.lists(
    st.tuples(st.sampled_from(keys), st.lists(words, min_size=1, max_size=3, unique=True)),
    max_size=3,
    unique_by=lambda axis: axis[0],
)


@given(methods, axes)
def test_there_is_a_cell_for_every_combination_in_a_folder_of_its_own(names, found):
    cells = cells_of(names, [axis_of(*one) for one in found], {"rounds": 3}, {"model.hidden": "7"})
    check_cells(cells)
    made = [(c.method, tuple(c.point.items())) for c in cells]
    grid = product(*([(key, value) for value in values] for key, values in found))
    assert made == list(product(names, grid))
    for cell in cells:
        given_flags = {k: v for k, v in cell.point.items() if "." not in k}
        assert cell.flags == {"rounds": 3, **given_flags}
        assert cell.options["model.hidden"] == cell.point.get("model.hidden", "7")


def test_names_of_cells_say_where_they_are():
    cells = cells_of(["bpfed"], [parse_axis("partition=iid,labels:5")], {}, {})
    assert [cell.name for cell in cells] == ["bpfed,partition=iid", "bpfed,partition=labels-5"]
    long = cells_of(["bpfed"], [axis_of("data", [f"{'x' * 200}{i}.npz" for i in range(3)])], {}, {})
    check_cells(long)
    alike = cells_of(["bpfed"], [axis_of("partition", ["labels:5", "labels/5", "iid"])], {}, {})
    check_cells(alike)
    assert alike[2].name == "bpfed,partition=iid"


@pytest.mark.parametrize(
    ("methods", "axes", "message"),
    [
        ([], [], "no method is given"),
        (["a", "b", "a"], [], "a is given twice"),
        (["a"], ["rounds=1", "rounds=2"], "rounds is given twice; give all its values at once"),
    ],
)
def test_what_is_given_twice_or_not_at_all_is_refused(methods, axes, message):
    with pytest.raises(OptionError, match=message):
        cells_of(methods, [*map(parse_axis, axes)], {}, {})


FILE = """
[[cell]]
name = "wide"
local-epochs = 2
[cell.options]
"model.hidden" = [200, 200]
inference.lr = 0.1

[[cell]]
method = "fedvi"
"""


def test_listed_settings_are_combined_with_methods_and_grid(tmp_path):
    (tmp_path / "list.toml").write_text(FILE)
    entries = read_list(tmp_path / "list.toml")
    options = {"model.hidden": [200, 200], "inference.lr": 0.1}
    assert entries == [Entry("wide", "", {"local_epochs": 2}, options), Entry("", "fedvi")]
    cells = cells_of(["bpfed", "fedavg"], [parse_axis("rounds=1,2")], {"lr": 1}, {}, entries)
    assert [cell.name for cell in cells] == [
        *("bpfed,wide,rounds=1", "bpfed,wide,rounds=2"),
        *("fedavg,wide,rounds=1", "fedavg,wide,rounds=2"),
        *("fedvi,2,rounds=1", "fedvi,2,rounds=2"),
    ]
    assert cells[2].flags == {"lr": 1, "local_epochs": 2, "rounds": 1}
    assert (cells[2].options, cells[4].options) == (options, {})
    only = cells_of(["bpfed"], [], {}, {}, entries[:1])
    assert [cell.name for cell in only] == ["wide"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs at least one"),
        ("a = 1", r"may have tables \[\[cell\]\] alone"),
        ("[cell]", r"may have tables \[\[cell\]\] alone"),
        ("cell = [1]", r"may have tables \[\[cell\]\] alone"),
        ("x =", "is not valid TOML"),
        ("[[cell]]\nname = 3", "name and method are text"),
        ("[[cell]]\n[cell.inference]\nlr = 1", "inference is a table; options are written as"),
    ],
)
def test_a_list_of_another_form_is_refused(tmp_path, text, message):
    path = tmp_path / "list.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=message):
        read_list(path)


def test_a_list_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(OptionError, match="cannot be read .No such file"):
        read_list(tmp_path / "absent.toml")
