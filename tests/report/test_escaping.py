"""Hostile names in every field of a run: the page shows them, and nothing in them is run.

Every page is parsed; where a browser is installed, it opens one, too.
"""

import base64
import html.parser
import json
import re
import shutil
from pathlib import Path

import attrs
import numpy as np
import pytest

from bflcore.cli import main
from bflcore.errors import RunError
from bflcore.report import write_report
from bflcore.report.landscape import Plane
from bflcore.report.page import render_page
from bflcore.report.plots import contours
from bflcore.report.reading import plain, read_run
from bflcore.report.table import print_table, row_of

from .browser import needs_browser, opened

RUN = "document.documentElement.setAttribute('data-hostile','1')"
HOSTILE = (
    f'"\'><img src=x onerror="{RUN}"><script>{RUN}</script><svg onload="{RUN}"></svg></script>'
    f'</title></style></pre></svg></details>--> ]]> <a href="javascript:{RUN}">x</a> '
    f"<iframe srcdoc='<script>parent.{RUN}</script>'></iframe> $\\frac$ $x^2$ {{{{ 7 * 7 }}}} "
    "{% raw %} &lt; \N{GRINNING FACE} \N{RIGHT-TO-LEFT OVERRIDE}txt \x00\x07\x1b[31m \udcff"
)
HARMLESS = "name"
KEPT = {"task"}  # decides which page it is


SAFE = re.compile(r"#[\w-]+|data:image/png;base64,[A-Za-z0-9+/]+={0,2}")
PICTURE = base64.b64encode(b"\x89PNG\r\n\x1a\n of a sample").decode()


class Elements(html.parser.HTMLParser):
    """The elements of a page with the names of their attributes, and every link."""

    def __init__(self):
        super().__init__()
        self.found, self.links, self.scripts = set(), [], []

    def handle_starttag(self, tag, attributes):
        self.found.add((tag, tuple(sorted(name for name, _ in attributes))))
        self.scripts += [""] if tag == "script" else []
        self.links += [value for name, value in attributes if name.endswith(("href", "src"))]

    def handle_data(self, data):
        if self.lasttag == "script" and self.scripts and not self.scripts[-1]:
            self.scripts[-1] = data


def elements(page):
    parser = Elements()
    parser.feed(page)
    parser.close()
    return parser


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with everything that a page may show but coefficients."""
    place = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    np.savez(place / "data.npz", x=rng.normal(size=(60, 3)), y=np.arange(60) % 3)
    np.savez(place / "other.npz", x=np.full((5, 3), 9.0))
    words = ("run", "superfed-mm", "--data", place / "data.npz", "--clients", "3", "--rounds", "2")
    words += ("--model", "mlp", "-o", "model.hidden=4", "--workers", "1", "--quiet")
    words += ("--calibration-fraction", "0.3", "--ood", place / "other.npz", "--out", place / "run")
    words += ("--validation-fraction", "0.2", "--local-epochs", "1")
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == 0
    return place / "run"


def filled(value, text, key=""):
    """Return plain values with a text in place of every text, and one more entry per mapping."""
    if isinstance(value, dict):
        return {k: filled(v, text, k) for k, v in value.items()}
    if isinstance(value, list):
        return [filled(v, text, key) for v in value]
    return text if isinstance(value, str) and key not in KEPT else value


def named(folder, text):
    """Return a run in which every name is `text`."""
    run = read_run(folder)
    summary = filled(run.summary, text)
    best = summary["best"]
    best[f"personal.{text}"] = {"mean": 0.5}
    reason = {"round": 1, "client": 0, "stage": text, "reason": text, text: text}
    summary |= {"dropped": [reason], "method": text}
    evaluation = filled(run.evaluation, text)
    axes = list(evaluation["curves"].values())
    evaluation["curves"] = {f"{text}{i}": points for i, points in enumerate(axes)}
    description = filled(run.description, text)
    description["classes"] = [f"{i}{text}" for i in range(3)]
    for i, client in enumerate(description["clients"]):
        client["id"] = f"{i}{text}"
    return attrs.evolve(
        run,
        path=Path(f"{text[:90]}{text[-50:]}".replace("/", "\\").replace("\x00", "")),
        experiment=filled(run.experiment, text) | {plain(text): plain(text)},
        summary=summary,
        evaluation=evaluation,
        environment=filled(run.environment, plain(text)) | {text: {plain(text): plain(text)}},
        description=description,
        unfinished=text,
        samples={"examined": 9, "unsure": [sample_with(text)], "wrong": [sample_with("")]},
    )


def sample_with(text):
    """Return a kept sample, with a text in place of its picture where there is one."""
    sample = {"client": 0, "sample": 3, "label": 1, "entropy": 0.5, "predicted": [[1, 0.5]]}
    return sample | {"picture": text or PICTURE}


def pages(folder, text):
    """Return the pages of one run, with a landscape, and of two."""
    run = named(folder, text)
    plane = Plane(0, [0, 1], [0, 1], {text: [[0, 1], [1, 2]]}, {text: (0.5, 0.5)})
    landscape = {"label": run.label, "client": text, "networks": [text], "svg": contours(plane)}
    return [render_page([run], [landscape]), render_page([run, run])]


def test_hostile_names_add_no_element_no_attribute_and_no_link(folder):
    for page, expected in zip(pages(folder, HOSTILE), pages(folder, HARMLESS), strict=True):
        found = elements(page)
        assert found.found == elements(expected).found
        assert not any(tag in {"iframe", "object", "embed", "base"} for tag, _ in found.found)
        assert found.scripts == elements(expected).scripts  # the page's own
        assert not any(name.startswith("on") for _, names in found.found for name in names)
        assert all(SAFE.fullmatch(link) for link in found.links)
        assert "&lt;script&gt;" in page
        assert not re.search("[\x00-\x08\x0b-\x1f\ud800-\udfff\u202e]", page)
        assert "{{ 7 * 7 }}" in page


def test_a_number_that_is_text_is_escaped_or_refused(folder, tmp_path):
    """A few numbers of evaluation.json and summary.json in turn."""
    run = read_run(folder)
    for part in ("evaluation", "summary"):
        values = json.dumps(getattr(run, part))
        numbers = list(re.finditer(r"(?<=: )-?\d[\d.e+-]*(?=[,}])", values))
        for match in numbers[:: max(1, len(numbers) // 4)]:
            changed = values[: match.start()] + json.dumps(HOSTILE) + values[match.end() :]
            hostile = attrs.evolve(run, **{part: json.loads(changed)})
            try:
                page = render_page([hostile])
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
                continue  # `write_report` makes one line of it
            found = elements(page)
            assert len(found.scripts) == 1
            assert "onerror" not in found.scripts[0]
            assert not any(tag == "iframe" for tag, _ in found.found)
            assert all(SAFE.fullmatch(link) for link in found.links)


def test_a_table_on_the_terminal_is_not_steered_by_a_name(folder, capsys):
    print_table([row_of(named(folder, HOSTILE)) | {HOSTILE: HOSTILE}])
    shown = capsys.readouterr().out
    assert not re.search("[\x00-\x09\x0b-\x1f\ud800-\udfff\u202e]", shown)
    assert "$x^2$" in shown


def test_files_of_another_form_are_one_line(folder, tmp_path):
    from bflcore.experiments.integrity import write_json

    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    for name, value in (
        ("evaluation.json", {"personal": {"clients": HOSTILE}}),
        ("summary.json", {"final": []}),
        ("data.json", {"clients": 5}),
    ):
        before = (copy / name).read_bytes()
        write_json(copy / name, value)
        with pytest.raises(RunError, match=r"run") as error:
            write_report([copy])
        assert "\n" not in str(error.value)
        (copy / name).write_bytes(before)
    write_report([copy])


@needs_browser
@pytest.mark.thorough
def test_a_browser_runs_no_script_of_a_page_with_hostile_names(folder, tmp_path):
    mark = re.compile("<html[^>]*data-hostile")
    control = f'<html><body><img src=x onerror="{RUN}"></body></html>'
    assert mark.search(opened(control, tmp_path))  # a script that is run shows
    for page in pages(folder, HOSTILE):
        shown = opened(page, tmp_path)
        assert not mark.search(shown)
        assert "onerror" in shown  # as text
