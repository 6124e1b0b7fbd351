"""The built manual: strict, complete, and without anything that is loaded from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SELF = ("script", "img", "iframe", "source", "video", "audio", "embed", "object")


class Loads(HTMLParser):
    """Collects the addresses that a browser fetches when it shows a page."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in SELF:
            self.addresses += [given.get("src") or given.get("data") or ""]
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(given.get("href") or "")
        self.addresses += re.findall(r"url\(([^)]+)\)", given.get("style") or "")


def loaded(text):
    page = Loads()
    page.feed(text)
    return page.addresses


def foreign(addresses):
    return [
        a for a in addresses if re.match(r"""["']?\s*([a-z][a-z0-9+.-]*:)?//""", a, re.IGNORECASE)
    ]


def test_what_a_page_loads_is_found():
    text = '<script src="https://cdn.example/x.js"></script><link rel="preconnect" href="//fonts">'
    text += '<img src="a.svg"><a href="https://example.org">a link is not loaded</a>'
    text += '<link rel="stylesheet" href="b.css"><p style="background: url(https://c/d.png)">'
    assert foreign(loaded(text)) == ["https://cdn.example/x.js", "//fonts", "https://c/d.png"]


def test_the_manual_is_built_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra docs: make installs it")
    pytest.importorskip("mkdocstrings", reason="needs the extra docs: make installs it")
    pytest.importorskip("latex2mathml", reason="needs the extra docs: make installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert foreign(loaded(text)) == [], page
        assert "/bflcore/blob/main/docs/" not in text, page  # a page of the manual is linked here
        # Material would fetch mermaid's scripts for such a block.
        assert 'class="mermaid"' not in text, page
        assert 'class="arithmatex"' not in text, page  # every formula has been typeset
    for sheet in (tmp_path / "site").rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        imported = re.findall(r"(?:url\(|@import\s*[\"'])([^)\"']+)", text)
        assert foreign(imported) == [], sheet
    formulas = (tmp_path / "site" / "methods" / "bpfed.html").read_text(encoding="utf-8")
    assert formulas.count("<math") >= 4
    python = (tmp_path / "site" / "reference" / "python.html").read_text(encoding="utf-8")
    assert 'id="bflcore.api.runs.run"' in python
    settings = (tmp_path / "site" / "reference" / "command-line.html").read_text(encoding="utf-8")
    assert "--calibration-fraction" in settings


def test_the_extra_that_builds_the_manual_is_installed_by_make():
    (installed,) = re.findall(
        r"^EDITABLE := -e '\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert "docs" in installed.split(",")
