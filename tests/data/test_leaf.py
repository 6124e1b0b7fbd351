"""LEAF's files, written small: users, their samples, and what is wrong with damaged ones."""

import json

import numpy as np
import pytest

from bflcore import DataError
from bflcore.data import divide
from bflcore.data.leaf import CHARACTERS, FEMNIST, Shakespeare
from bflcore.data.partition import Natural

LINE = "To be, or not to be: that is the question; Whether 'tis nobler in the mind to s."
GREY = [k % 256 / 255 for k in range(784)]
SOURCES = {"shakespeare": (Shakespeare(), LINE, "u"), "femnist": (FEMNIST(), GREY, 61)}

each = pytest.mark.parametrize("name", SOURCES)


def user_data(name, count):
    """Return `count` equal samples."""
    _, x, y = SOURCES[name]
    return {"x": [x] * count, "y": [y] * count}


def content(users):
    """Return what LEAF writes for ``{user: {x, y}}``."""
    counts = [len(data["y"]) for data in users.values()]
    return {"users": list(users), "num_samples": counts, "user_data": users}


def write(folder, **files):
    """Write ``train_0`` to ``train/all_data_0.json``, and so on."""
    for file, content in files.items():
        half, _, number = file.partition("_")
        path = folder / half / f"all_data_{number or 0}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text, encoding="utf-8")
    return folder


def halves(folder, name, train, test):
    """Write both halves, given how many samples each user has."""
    made = [content({u: user_data(name, n) for u, n in counts.items()}) for counts in (train, test)]
    return write(folder, train=made[0], test=made[1])


def test_the_vocabulary_is_leafs():
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 80
    assert CHARACTERS[0] == "\n"
    assert CHARACTERS[-1] == "}"
    assert list(CHARACTERS) == sorted(CHARACTERS)  # as in LEAF, in the order of ASCII


def test_shakespeares_samples_are_codes_of_characters(tmp_path):
    data = Shakespeare().load(halves(tmp_path, "shakespeare", {"HAMLET": 2}, {"HAMLET": 1}))
    assert data.x.shape == (2, 80)
    assert (data.x.dtype, data.unit, data.classes) == (np.uint8, 1.0, 80)
    for half in (data.x, data.x_test):
        assert "".join(CHARACTERS[code] for code in half[0]) == LINE
    assert [CHARACTERS[label] for label in data.y] == ["u", "u"]


def test_femnists_pixels_are_as_leaf_stores_them(tmp_path):
    data = FEMNIST().load(halves(tmp_path, "femnist", {"f1": 2}, {"f1": 1}))
    assert data.x.shape == (2, 1, 28, 28)
    assert (data.x.dtype, data.unit, data.classes) == (np.uint8, 255.0, 62)
    np.testing.assert_array_equal(data.x[0].ravel() / 255, GREY)
    assert (data.y.tolist(), data.y_test.tolist()) == ([61, 61], [61])


@each
def test_users_own_their_samples_in_both_halves_of_leafs_split(tmp_path, name):
    halves(tmp_path, name, {"b": 3, "c": 2}, {"c": 1, "b": 2})
    write(tmp_path, train_1=content({"a": user_data(name, 1)}))
    write(tmp_path, test_1=content({"a": user_data(name, 4)}))
    data = SOURCES[name][0].load(tmp_path)
    assert data.client.tolist() == [1, 1, 1, 2, 2, 0]
    assert data.client_test.tolist() == [2, 1, 1, 0, 0, 0, 0]
    assert data.y.dtype == np.int64

    part = divide(data, Natural(), 3, np.random.default_rng(0))
    assert part.held_out
    assert [len(share) for share in part.train] == [1, 3, 2]
    assert [share.tolist() for share in part.test] == [[3, 4, 5, 6], [1, 2], [0]]


@each
@pytest.mark.parametrize("inside", [".", "data", "{name}", "{name}/data"])
def test_leafs_own_folders_are_found(tmp_path, name, inside):
    folder = tmp_path / inside.format(name=name)
    halves(folder, name, {"a": 1}, {"a": 1})
    assert len(SOURCES[name][0].load(tmp_path).x) == 1


@each
def test_absent_files_say_which_commands_write_them(tmp_path, name):
    source = SOURCES[name][0]
    write(tmp_path, train=content({"a": user_data(name, 1)}))  # the other half is absent
    for folder, where in ((tmp_path, f"not in {tmp_path}"), (None, "--data-dir is not given")):
        with pytest.raises(DataError) as refused:
            source.load(folder)
        assert where in str(refused.value)
        assert f"cd leaf/data/{name} && ./preprocess.sh -t sample" in str(refused.value)
        assert "\n" not in str(refused.value)


@each
def test_a_split_by_user_is_refused_with_the_command_for_a_split_by_sample(tmp_path, name):
    halves(tmp_path, name, {"a": 1, "b": 1}, {"c": 1})
    with pytest.raises(DataError, match=r"user 'a' is in one of the folders .* -t sample"):
        SOURCES[name][0].load(tmp_path)


@each
def test_a_user_in_two_files_of_a_half_is_refused(tmp_path, name):
    halves(tmp_path, name, {"a": 1, "b": 1}, {"a": 1, "b": 1})
    write(tmp_path, train_1=content({"b": user_data(name, 1)}))
    with pytest.raises(DataError, match=r"train: user 'b' is in two files"):
        SOURCES[name][0].load(tmp_path)


def altered(name, **changes):
    """Return the content of a file of one user, with some of it replaced."""
    made = content({"a": user_data(name, 2)})
    for key, value in changes.items():
        target = made if key in made else made["user_data"]["a"]
        target[key] = value
    return made


@each
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_samples": [3]}, "user 'a' has 2 samples and 2 labels, num_samples says 3"),
        ({"y": []}, "user 'a' has 2 samples and 0 labels"),
        ({"num_samples": []}, "damaged"),
        ({"num_samples": None}, "damaged"),
        ({"user_data": {}}, "'a' is missing"),
        ({"user_data": {"a": {"x": []}}}, "'y' is missing"),
        ({"users": [], "num_samples": []}, "it has no samples"),
        ({"x": [[1.0], [1.0]]}, "sample 0 of user 'a': x "),
        ({"x": [None, None]}, "sample 0 of user 'a': x "),
        ({"y": [None, None]}, "sample 0 of user 'a': "),
        ({"y": [62, "??"]}, "sample 0 of user 'a': "),
    ],
)
def test_damaged_files_are_named_with_what_is_wrong(tmp_path, name, changes, reason):
    halves(tmp_path, name, {"a": 1}, {"a": 1})
    write(tmp_path, test=altered(name, **changes))
    with pytest.raises(DataError) as refused:
        SOURCES[name][0].load(tmp_path)
    path = tmp_path / "test" / "all_data_0.json"
    assert str(refused.value).startswith(f"{path} is damaged: ")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@each
@pytest.mark.parametrize("text", ['{"users": ["a"], "num_sam', "[]", "3", "", "{}"])
def test_truncated_and_foreign_files_are_named(tmp_path, name, text):
    halves(tmp_path, name, {"a": 1}, {"a": 1})
    write(tmp_path, train=text)
    with pytest.raises(DataError, match=r"train/all_data_0.json is damaged: .*preprocess.sh"):
        SOURCES[name][0].load(tmp_path)


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (LINE[1:], "u", "x is not a string of 80 characters"),
        (LINE[:-1] + "~", "u", "'~' is not one of LEAF's 80 characters"),
        (LINE[:-1] + "\u2014", "u", "can't encode"),
        (LINE, "\u00e9", "'\u00e9' is not one of LEAF's"),
        (LINE, "", "'' is not one of LEAF's"),
    ],
)
def test_unknown_characters_are_refused(tmp_path, x, y, reason):
    halves(tmp_path, "shakespeare", {"a": 1}, {"a": 1})
    write(tmp_path, train=content({"a": {"x": [LINE, x], "y": ["u", y]}}))
    with pytest.raises(DataError, match=f"sample 1 of user 'a': .*{reason}"):
        Shakespeare().load(tmp_path)


@pytest.mark.parametrize("pixel", [1.1, -0.1, 0.5, float("nan")])  # 0.5 is between two bytes
def test_pixels_that_are_no_bytes_are_refused(tmp_path, pixel):
    halves(tmp_path, "femnist", {"a": 1}, {"a": 1})
    write(tmp_path, train=content({"a": {"x": [[*GREY[:-1], pixel]], "y": [3]}}))
    with pytest.raises(DataError, match="not multiples of 1/255 between 0 and 1"):
        FEMNIST().load(tmp_path)
