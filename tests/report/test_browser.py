"""The page in a real browser: it fits, sorts, follows the colour scheme, and fetches nothing."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from bflcore.cli import main
from bflcore.report.page import render_page
from bflcore.report.reading import read_run

from . import browser
from .browser import needs_browser, opened

# What the probe finds out is left in an attribute; it is put into a copy of the page without the
# policy that would keep it from running.
PROBE = """<script>addEventListener("load", () => {
  const place = (table) =>
    [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent == "accuracy");
  const table = [...document.querySelectorAll("table.sortable")].find((one) => place(one) >= 0);
  const column = (i) =>
    [...table.tBodies[0].rows].map((row) => parseFloat(row.cells[i].textContent.match(/[\\d.]+/)));
  const head = place(table);
  const button = table.tHead.rows[0].cells[head].querySelector("button");
  button.click(); const rising = column(head); button.click();
  document.documentElement.setAttribute("data-found", JSON.stringify({
    rising, falling: column(head), order: table.tHead.rows[0].cells[head].getAttribute("aria-sort"),
    paper: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.querySelector("svg text")).fill,
    wide: document.documentElement.scrollWidth, window: innerWidth,
    pictures: [...document.images].map((image) => image.naturalWidth),
    fetched: performance.getEntriesByType("resource").map((entry) => entry.name)
      .filter((name) => !name.startsWith("data:")),
  }));
});</script>"""


def with_accuracy(summary, value):
    """Return a summary with this mean accuracy."""
    final = summary["final"]
    changed = {"personal.accuracy": final["personal.accuracy"] | {"mean": value}}
    return summary | {"final": final | changed}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of two runs on small images, of a calibrated one, and of eight groups of seeds."""
    place = tmp_path_factory.mktemp("runs")
    words = ("--data", "digits", "--clients", "3", "--rounds", "2", "--eval-every", "1")
    words += ("--workers", "1", "--local-epochs", "1", "--quiet")
    for method, more in (("fedavg", ()), ("fedvi", ("--calibration-fraction", "0.3"))):
        with pytest.raises(SystemExit) as end:
            main(["run", method, *words, *more, "--out", str(place / method)])
        assert end.value.code == 0
    one, calibrated = (read_run(place / method) for method in ("fedavg", "fedvi"))
    many = [
        attrs.evolve(
            one,
            path=Path(f"a-method-with-a-long-name-{i}-{seed}"),
            experiment=one.experiment | {"rounds": i, "seed": seed},
            summary=with_accuracy(one.summary, i % 5 / 10 + seed / 100),
        )
        for i in range(8)
        for seed in range(2)
    ]
    chosen = {"two": [one, calibrated], "calibrated": [calibrated], "many": many}
    return {name: render_page(runs) for name, runs in chosen.items()}


def found(page, tmp_path, width, scheme):
    free = re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", f"{PROBE}</body>")
    scheme = f"--blink-settings=preferredColorScheme={scheme}"
    shown = opened(free, tmp_path, f"--window-size={width},900", scheme)
    return json.loads(html.unescape(re.search(r'data-found="([^"]*)"', shown)[1]))


DARK, LIGHT = 0, 1


def brightness(colour):
    """Return the mean of red, green and blue of ``rgb(r, g, b)``."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(380, DARK), (1280, LIGHT)])
@pytest.mark.parametrize("name", ["two", "calibrated", "many"])
def test_the_page_fits_sorts_and_follows_the_scheme(pages, name, tmp_path, width, scheme):
    seen = found(pages[name], tmp_path, width, scheme)
    assert len({*seen["rising"]}) > 1
    assert seen["rising"] == sorted(seen["rising"])
    assert seen["falling"] == seen["rising"][::-1]
    assert seen["order"] == "descending"
    assert seen["wide"] <= seen["window"] <= max(width, 500)  # no scrolling sideways
    paper, ink = (brightness(seen[name]) for name in ("paper", "ink"))
    assert (paper < 60 < 140 < ink) if scheme == DARK else (paper > 200 > 130 > ink)
    assert len(seen["pictures"]) >= 24
    assert set(seen["pictures"]) == {8}
    assert seen["fetched"] == []


@needs_browser
def test_numbers_are_sorted_as_such_whatever_marks_stand_before_them(pages, tmp_path):
    page = pages["two"]
    columns = page.partition("<thead>")[2].partition("</thead>")[0].count("<th")
    texts = ("0.3", "<span>?</span> 0.2", "<span>≈</span> 0.1")
    rows = "".join(f"<tr>{f'<td>{text}</td>' * columns}</tr>" for text in texts)
    marked = re.sub(r"(<tbody>).*?(</tbody>)", rf"\1{rows}\2", page, count=1, flags=re.DOTALL)
    assert found(marked, tmp_path, 800, LIGHT)["rising"] == [0.1, 0.2, 0.3]


@needs_browser
def test_a_script_that_is_not_the_pages_own_is_not_run(pages, tmp_path):
    page = pages["two"]
    mark = "document.documentElement.setAttribute('data-hostile','1')"
    hostile = page.replace("</body>", f"<script>{mark}</script><img src=x onerror={mark!r}></body>")
    assert not re.search("<html[^>]*data-hostile", opened(hostile, tmp_path))
    free = re.sub(r"<meta http-equiv[^>]*>", "", hostile)
    assert re.search("<html[^>]*data-hostile", opened(free, tmp_path))


@pytest.mark.parametrize(("ci", "skipped"), [("", "True"), ("true", "False")])
def test_without_a_browser_pages_are_skipped_unless_ci_is_set(tmp_path, ci, skipped):
    """Where it is set, `opened` fails and says why."""
    source = (
        "import browser; print(browser.needs_browser.args[0])\n"
        "try: browser.opened('', None)\n"
        "except AssertionError as error: print(error)"
    )
    paths = {"PATH": str(tmp_path), "PYTHONPATH": str(Path(browser.__file__).parent), "CI": ci}
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | paths,
        capture_output=True,
        text=True,
        check=True,
    )
    said = "no chromium or google-chrome is installed, and CI is set; install one"
    assert done.stdout.splitlines() == [skipped, said]
