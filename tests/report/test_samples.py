"""Single samples on the page: what is shown of each, and what is not trusted."""

import base64
from pathlib import Path

import pytest

from bflcore.report.reading import Run
from bflcore.report.samples import LONGEST, section

PICTURE = base64.b64encode(b"\x89PNG\r\n\x1a\n and so on").decode()
SAMPLE = {
    "client": 1,
    "sample": 7,
    "label": 2,
    "entropy": 1.25,
    "predicted": [[0, 0.61], [2, 0.3], [1, 0.09]],
    "picture": PICTURE,
}


def run(**kinds):
    described = {"classes": ["cat", "dog", "bird"], "clients": [{"id": "a"}, {"id": "b"}]}
    samples = {"examined": 50, "unsure": [], "wrong": [], **kinds}
    return Run(Path("a"), {}, [], {}, {}, {}, described, samples=samples)


def test_a_sample_says_whose_it_is_what_it_is_and_what_was_predicted():
    found = section(run(wrong=[SAMPLE]))
    assert found["examined"] == 50
    (kind,) = found["kinds"]
    assert kind["title"] == "Surest errors"
    (card,) = kind["samples"]
    assert (card["client"], card["label"], card["number"]) == ("b", "bird", 7)
    assert [(g["class"], g["right"], g["percent"]) for g in card["predicted"]] == [
        ("cat", False, 61),
        ("bird", True, 30),
        ("dog", False, 9),
    ]
    assert card["picture"] == PICTURE


def test_a_run_that_kept_none_has_no_section():
    assert section(Run(Path("a"), {}, [], {}, {}, {}))["kinds"] == []


@pytest.mark.parametrize(
    "picture",
    [
        '"><script>alert(1)</script>',
        PICTURE + '" onerror="x',
        base64.b64encode(b"<svg onload=alert(1)>").decode(),  # not a PNG
        PICTURE.rstrip("=") + "A" * LONGEST,
        "\n" + PICTURE,
    ],
)
def test_what_is_not_a_small_picture_is_not_shown(picture):
    (kind,) = section(run(unsure=[SAMPLE | {"picture": picture}]))["kinds"]
    assert kind["samples"][0]["picture"] == ""
