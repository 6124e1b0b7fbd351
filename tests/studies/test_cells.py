"""A cell names its folder and the command that repeats a run; seeds are read from text."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bflcore import OptionError
from bflcore.studies.cells import Cell, check_cells, seeds_of


def listed(seeds):
    """Write numbers as a list in which every run of three or more is a range."""
    words, start = [], 0
    while start < len(seeds):
        end = start
        while end + 1 < len(seeds) and seeds[end + 1] == seeds[end] + 1:
            end += 1
        if end - start >= 2:
            words.append(f"{seeds[start]}-{seeds[end]}")
        else:
            words += [str(seed) for seed in seeds[start : end + 1]]
        start = end + 1
    return ",".join(words)


@given(st.lists(st.integers(0, 60), unique=True, min_size=1).map(sorted))
def test_seeds_are_read_back_from_the_text_that_lists_them(seeds):
    assert seeds_of(listed(seeds)) == tuple(seeds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4-0", "'4-0' is not allowed; allowed: numbers and ranges"),
        ("", "'' is not allowed"),
        ("1,,2", "'' is not allowed"),
        ("a-b", "'a-b' is not allowed"),
        ("-1", "'-1' is not allowed"),
        ("1.5", "'1.5' is not allowed"),
        ("0-3,2", "names 2 twice"),
        ("0-99999999", "are too many; allowed: at most 10,000"),
    ],
)
def test_seeds_that_are_none_are_refused(text, message):
    with pytest.raises(OptionError, match=message):
        seeds_of(text)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "ü", "a" * 151, "-o"])
def test_a_cell_whose_name_is_no_folder_is_refused(name):
    with pytest.raises(OptionError, match="its name is a folder's"):
        Cell(name, "fedavg")


@pytest.mark.parametrize("flag", ["seed", "out"])
def test_what_the_study_decides_is_no_flag_of_a_cell(flag):
    with pytest.raises(OptionError, match=f"{flag} is not a setting of a cell, but the"):
        Cell("a", "fedavg", {flag: 1})


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b", "A")])
def test_two_cells_do_not_share_a_folder_on_any_system(names):
    with pytest.raises(OptionError, match="two cells are called"):
        check_cells([Cell(name, "fedavg") for name in names])


def test_a_study_without_cells_is_refused():
    with pytest.raises(OptionError, match="there is no cell"):
        check_cells([])


def test_the_command_repeats_the_run():
    flags = {"data": "my data.npz", "local_epochs": 3, "download": True, "client": None}
    options = {"model.hidden": (5, 4), "inference.lr": 0.1}
    words = shlex.split(Cell("a", "bpfed", flags, options).command(7))
    assert words == [
        *("bfl", "run", "bpfed", "--data", "my data.npz", "--local-epochs", "3", "--download"),
        *("-o", "model.hidden=5,4", "-o", "inference.lr=0.1", "--seed", "7"),
    ]
