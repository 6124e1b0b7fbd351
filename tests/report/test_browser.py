"""The page in a real browser: it fits, sorts, follows the colour scheme, and fetches nothing."""

import html
import json
import re

import pytest

from bflcore.cli import main
from bflcore.report import write_report

from .browser import needs_browser, opened

pytestmark = needs_browser

# What the probe finds out is left in an attribute; it is put into a copy of the page without the
# policy that would keep it from running.
PROBE = """<script>addEventListener("load", () => {
  const table = document.querySelector("table.sortable");
  const column = (i) =>
    [...table.tBodies[0].rows].map((row) => parseFloat(row.cells[i].textContent.match(/[\\d.]+/)));
  const head = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent == "accuracy");
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


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The text of a page that compares two runs on small images."""
    place = tmp_path_factory.mktemp("runs")
    words = (
        "--data",
        "digits",
        "--clients",
        "3",
        "--rounds",
        "2",
        "--eval-every",
        "1",
        "--workers",
    )
    for method in ("fedavg", "fedvi"):
        given = ("run", method, *words, "1", "--local-epochs", "1", "--quiet")
        with pytest.raises(SystemExit) as end:
            main([*given, "--out", str(place / method)])
        assert end.value.code == 0
    return write_report([place / "fedavg", place / "fedvi"], place / "both.html").read_text()


def found(page, tmp_path, width, scheme):
    free = re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", f"{PROBE}</body>")
    scheme = f"--blink-settings=preferredColorScheme={scheme}"
    shown = opened(free, tmp_path, f"--window-size={width},900", scheme)
    return json.loads(html.unescape(re.search(r'data-found="([^"]*)"', shown)[1]))


DARK, LIGHT = 0, 1


def brightness(colour):
    """Return the mean of red, green and blue of ``rgb(r, g, b)``."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


@pytest.mark.parametrize(("width", "scheme"), [(380, DARK), (1280, LIGHT)])
def test_the_page_fits_sorts_and_follows_the_scheme(page, tmp_path, width, scheme):
    seen = found(page, tmp_path, width, scheme)
    assert seen["rising"] == sorted(seen["rising"])
    assert seen["falling"] == seen["rising"][::-1]
    assert seen["order"] == "descending"
    assert seen["wide"] <= seen["window"] <= max(width, 500)  # no scrolling sideways
    paper, ink = (brightness(seen[name]) for name in ("paper", "ink"))
    assert (paper < 60 < 140 < ink) if scheme == DARK else (paper > 200 > 130 > ink)
    assert len(seen["pictures"]) >= 24
    assert set(seen["pictures"]) == {8}
    assert seen["fetched"] == []


def test_numbers_are_sorted_as_such_whatever_marks_stand_before_them(page, tmp_path):
    columns = page.partition("<thead>")[2].partition("</thead>")[0].count("<th")
    texts = ("0.3", "<span>?</span> 0.2", "<span>≈</span> 0.1")
    rows = "".join(f"<tr>{f'<td>{text}</td>' * columns}</tr>" for text in texts)
    marked = re.sub(r"(<tbody>).*?(</tbody>)", rf"\1{rows}\2", page, count=1, flags=re.DOTALL)
    assert found(marked, tmp_path, 800, LIGHT)["rising"] == [0.1, 0.2, 0.3]


def test_a_script_that_is_not_the_pages_own_is_not_run(page, tmp_path):
    mark = "document.documentElement.setAttribute('data-hostile','1')"
    hostile = page.replace("</body>", f"<script>{mark}</script><img src=x onerror={mark!r}></body>")
    assert not re.search("<html[^>]*data-hostile", opened(hostile, tmp_path))
    free = re.sub(r"<meta http-equiv[^>]*>", "", hostile)
    assert re.search("<html[^>]*data-hostile", opened(free, tmp_path))
