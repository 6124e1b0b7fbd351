"""The gallery shows what its script draws, in small files that load nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRAW = ROOT / "docs" / "draw_gallery.py"
IMAGES = ROOT / "docs" / "images"


def shown():
    """Return the pictures of the gallery that its script draws, by name."""
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    return re.findall(r"\(images/gallery-(\w+)\.svg\)", text)


def drawn():
    return re.findall(r'^    "(\w+)": \1,$', DRAW.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_picture_that_is_drawn_is_shown_and_described():
    assert sorted(shown()) == sorted(drawn())
    assert len(shown()) >= 4
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert all(len(words) > 20 for words in re.findall(r"!\[([^\]]*)\]\(images/", text))


@pytest.mark.parametrize("name", drawn())
def test_pictures_are_small_and_load_nothing(name):
    text = (IMAGES / f"gallery-{name}.svg").read_text(encoding="utf-8")
    assert len(text) < 200_000
    assert re.findall(r'href="(?!#)[^"]*"', text) == []
    assert "<text" in text  # letters stay letters


@pytest.mark.thorough
def test_the_script_draws_the_same_picture_again(tmp_path):
    before = (IMAGES / "gallery-sets.svg").read_bytes()
    (tmp_path / "images").mkdir()
    (tmp_path / "draw_gallery.py").write_text(DRAW.read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run([sys.executable, tmp_path / "draw_gallery.py", "sets"], check=True)
    assert (tmp_path / "images" / "gallery-sets.svg").read_bytes() == before
