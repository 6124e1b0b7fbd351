"""The page of a finished run: what it says, escapes, and leaves out."""

import base64
import hashlib
import html
import json
import re
from pathlib import Path

import attrs
import numpy as np
import pytest

from bflcore.cli import main
from bflcore.data.partition import Natural
from bflcore.errors import RunError
from bflcore.report import comparison, write_report
from bflcore.report.page import render_page
from bflcore.report.plots import COLOURS, GREY
from bflcore.report.reading import read_run

SIZES = (12, 9, 1)  # the last client's only sample trains: it has none to test on


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a method on clients of `SIZES` samples; return its folder."""

    def assign(partition, dataset, clients, rng):
        return np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])

    monkeypatch.setattr(Natural, "assign", assign)

    def of(targets, *words):
        x = np.random.default_rng(0).normal(size=(sum(SIZES), 3)).astype(np.float32)
        np.savez(tmp_path / "data.npz", x=x, y=targets)
        given = ("--data", tmp_path / "data.npz", "--partition", "natural", "--clients", "3")
        quick = ("--rounds", "1", "--local-epochs", "1", "--workers", "1", "--quiet")
        small = ("--model", "mlp", "-o", "model.hidden=4")
        with pytest.raises(SystemExit) as end:
            main([*map(str, ("run", *words, *given, *quick, *small, "--out", tmp_path / "run"))])
        assert end.value.code == 0
        return tmp_path / "run"

    return of


@pytest.mark.parametrize("words", [("fedavg",), ("superfed-mm", "--cohort", "3")])
def test_a_client_without_test_samples_is_left_out_of_the_page(run, words):
    folder = run(np.arange(sum(SIZES)) % 4, *words)
    detail = json.loads((folder / "evaluation.json").read_text())
    assert [client["client"] for client in detail["personal"]["clients"]] == [0, 1]
    assert (folder / "report.html").exists()


def test_a_run_that_nobody_can_test_says_so(run, capsys):
    folder = run(np.arange(sum(SIZES)) % 4, "fedavg", "--train-per-class", "12")
    page = (folder / "report.html").read_text()
    assert "No client has a test sample" in page
    assert "<svg" not in page
    assert "warning: no client has a test sample" in capsys.readouterr().err


def test_a_metric_that_one_client_lacks_is_a_dash_and_ranks_last(run):
    read = read_run(run(np.arange(sum(SIZES)) % 4, "fedavg"))
    clients = [{"client": 7, "examples": 0}, *read.evaluation["personal"]["clients"]]
    personal = read.evaluation["personal"] | {"clients": clients}
    personal |= {name: read.evaluation["personal"][name] for name in ("reliability", "retention")}
    page = render_page([attrs.evolve(read, evaluation={"personal": personal})])
    shown = page[page.index("<h2>Clients") : page.index("<details>")]
    (absent,) = re.findall(r"<tr><td>7</td>.*?</tr>", shown)
    assert absent.count("<td>-</td>") == len(re.findall("<th>", shown)) - 3  # client, tests, bar
    assert shown.index(absent) > shown.rindex("<td>1</td>")


def test_targets_that_do_not_vary_at_a_client_leave_its_page_whole(run):
    targets = np.linspace(0, 1, sum(SIZES), dtype=np.float32)
    targets[: SIZES[0]] = 0.5
    folder = run(targets, "fedavg")
    first, second = json.loads((folder / "evaluation.json").read_text())["personal"]["clients"]
    assert "nmse" in second
    assert "nmse" not in first
    assert f"<td>{second['nmse']:.4f}</td>" in write_report([folder]).read_text()


def test_a_page_says_what_must_not_be_reported_and_names_its_sections(run):
    page = (run(np.arange(sum(SIZES)) % 4, "fedavg") / "report.html").read_text()
    headings = ("Final metrics", "Calibration", "Selective prediction")
    for heading in (*headings, "Classes: run", "Clients: run", "What the metrics mean"):
        assert f"<h2>{heading}</h2>" in page
    assert "chosen on test data: an upper bound, not a result to report." in page
    assert page.count("<svg") == 4 + 1  # and the legend's
    for term in ("ECE", "NLL", "Brier", "epistemic", "retention"):
        assert f"<dt>{term}</dt>" in page
    assert all(text in page for text in ("Means, deviations (std)", "Pooled: all clients"))
    assert len(page) < 2e6
    inside = re.sub(r'(src|href)="(#|data:image/png;base64,)', "", page)
    assert not re.search(r"(src|href)=|url\(['\"]?http|@import", inside)
    anchors = re.findall(r'<a href="#(\w+)">', page)
    assert len(anchors) > 6
    assert all(page.count(f'<section id="{anchor}">') == 1 for anchor in anchors)


def test_texts_of_a_run_are_escaped_and_pictures_are_not(run):
    read = read_run(run(np.arange(sum(SIZES)) % 4, "fedavg"))
    reason = "<script>alert('&')</script>"
    dropped = [{"round": 1, "client": 0, "stage": "fit", "reason": reason}]
    summary = read.summary | {"dropped": dropped}
    page = render_page([attrs.evolve(read, summary=summary, path=Path("<b>run"))])
    assert reason not in page
    assert "&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;" in page
    assert "<b>run" not in page
    assert "<title>&lt;b&gt;run</title>" in page


def test_clients_without_test_samples_are_named(run):
    page = (run(np.arange(sum(SIZES)) % 4, "fedavg") / "report.html").read_text()
    assert "run: without test samples, and so in none of the metrics: clients\n2." in page


def test_a_page_shows_names_of_clients_and_classes(run):
    read = read_run(run(np.arange(sum(SIZES)) % 4, "fedavg"))
    clients = [one | {"id": f"hospital {i}"} for i, one in enumerate(read.description["clients"])]
    named = read.description | {"clients": clients, "classes": ["a & b", "c", "d", "e"]}
    page = render_page([attrs.evolve(read, description=named)])
    assert "<td>hospital 1</td><td>7</td><td>2</td>" in page
    assert "<td>a &amp; b</td>" in page
    assert "clients\nhospital 2." in page


def test_many_clients_keep_the_page_small(run):
    read = read_run(run(np.arange(sum(SIZES)) % 4, "fedavg"))
    (first, *_), personal = read.evaluation["personal"]["clients"], read.evaluation["personal"]
    many = [first | {"client": i, "accuracy": i / 10_000} for i in range(10_000)]
    crowd = [{"id": i, "train": 1, "test": i % 2} for i in range(10_000)]
    evaluation = {"personal": personal | {"clients": many}}
    described = read.description | {"clients": crowd}
    page = render_page([attrs.evolve(read, evaluation=evaluation, description=described)])
    assert "9800 more clients are in evaluation.json" in page
    assert page.index("<td>0</td><td>1</td>") < page.index("<td>199</td><td>1</td>")
    assert len(page) < 4e5


def test_many_runs_keep_the_page_below_two_megabytes_and_all_are_compared(run):
    read = read_run(run(np.arange(sum(SIZES)) % 4, "fedavg"))
    (first, *_), personal = read.evaluation["personal"]["clients"], read.evaluation["personal"]
    many = [first | {"client": i, "accuracy": i / 1000} for i in range(1000)]
    columns = {"client": [*range(200)], "accuracy": [0.5] * 200, "nll": [1.0] * 200}
    records = [read.records[-1] | {"round": i, "by_client": columns} for i in range(20)]
    picture = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(12_000)).decode()
    sample = {"client": 0, "sample": 1, "label": 1, "entropy": 0.5, "predicted": [[1, 0.5]]}
    kept = {"examined": 2000, "wrong": [sample | {"picture": picture}] * 12}
    runs = [
        attrs.evolve(
            read,
            path=Path(f"run{i}"),
            experiment=read.experiment | {"rounds": i},
            evaluation={"personal": personal | {"clients": many}},
            records=records,
            samples=kept,
        )
        for i in range(9)
    ]
    page = render_page(runs)
    assert len(page) < 2e6
    assert "all 9 runs" in page
    assert page.count("<h2>Clients: run") == 6
    compared = page[page.index("<h2>Comparison") : page.index("<h2>Learning curves")]
    assert all(f"<td>run{i}</td>" in compared for i in range(9))


def test_many_seeds_and_groups_are_drawn_by_group_and_detailed_by_one_run_of_each(run):
    read = read_run(run(np.arange(sum(SIZES)) % 4, "fedavg"))
    records = [read.records[-1] | {"round": i} for i in range(300)]
    runs = [
        attrs.evolve(
            read,
            path=Path(f"m{i}-{seed}"),
            experiment=read.experiment | {"method": f"m{i}", "seed": seed},
            records=records,
        )
        for i in range(8)
        for seed in range(3)
    ]
    page = render_page(runs)
    assert len(page) < 2e6
    legend = page[page.index('<ul class="legend">') : page.index("</ul>", page.index('legend">'))]
    assert re.findall("</svg>(.*?)</li>", legend) == [f"m{i}" for i in range(8)]
    assert legend.count("var(--c0); stroke-dasharray: none") == 1
    assert legend.count("var(--c0); stroke-dasharray: 6") == 1
    details = re.findall("<h2>Clients: (.*?)</h2>", page)
    assert details == [f"m{i}-0" for i in range(6)]
    assert "all 24 runs; single clients, classes and samples are shown of the 6 above" in page
    assert "So many reliability diagrams cannot be told apart" in page
    assert page.count("a band from the lowest to the highest seed") == 2  # curves, retention


def test_intervals_of_a_regression_are_drawn_over_what_is_due(run):
    folder = run(np.linspace(0, 1, sum(SIZES), dtype=np.float32), "fedavg")
    page = write_report([folder]).read_text()
    assert "nominal coverage (%)" in page
    assert page.count('<section id="calibration">') == 1
    assert '<a href="#calibration">Calibration</a>' in page


def test_runs_without_a_recorded_aurc_have_the_pooled_one_of_their_curves(run):
    read = read_run(run(np.arange(sum(SIZES)) % 4, "fedavg"))
    other = attrs.evolve(read, path=Path("other"))
    assert "AURC" in comparison.section([read, other])["columns"]
    final = {k: v for k, v in read.summary["final"].items() if k != "personal.aurc"}
    older = attrs.evolve(other, summary=read.summary | {"final": final})
    found = comparison.section([read, older])
    assert "AURC" not in found["columns"]
    cells = [row[found["columns"].index("AURC, pooled")] for row in found["rows"]]
    expected = read.summary["final"]["personal.aurc"]["pooled"]
    assert [cell["text"] for cell in cells] == [f"{expected:.4f}"] * 2
    render_page([read, older])


def test_an_unfinished_run_has_a_page_that_says_so(run):
    folder = run(np.arange(sum(SIZES)) % 4, "fedavg")
    (folder / "summary.json").unlink()
    assert (
        "round 1 of 1, unfinished: continue with: bfl resume" in write_report([folder]).read_text()
    )


def test_foreign_samples_have_histograms_and_metrics(run, tmp_path):
    np.savez(tmp_path / "other.npz", x=np.full((5, 3), 9.0))
    flags = ("--ood", str(tmp_path / "other.npz"))
    folder = run(np.arange(sum(SIZES)) % 4, "fedavg", *flags)
    final = json.loads((folder / "summary.json").read_text())["final"]
    assert set(final["ood.auroc"]) == {"mean", "std", "pooled"}
    page = (folder / "report.html").read_text()
    assert "<h2>Out of distribution: run</h2>" in page
    assert "<td>OOD AUROC</td>" in page


def test_a_page_may_run_its_own_script_and_fetch_nothing(run):
    page = (run(np.arange(sum(SIZES)) % 4, "fedavg") / "report.html").read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in html.unescape(policy).split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert rules["script-src"] == f"'sha256-{digest}'"


def test_pictures_take_their_colours_from_the_page(run):
    page = (run(np.arange(sum(SIZES)) % 4, "fedavg") / "report.html").read_text()
    drawn = page[page.index("<svg") :]
    assert not any(colour.lower() in drawn.lower() for colour in (*COLOURS, GREY))
    assert "stroke: var(--c0)" in drawn
    assert all(f"--c{place}:" in page for place in range(len(COLOURS)))


def test_two_runs_share_a_page(run, tmp_path):
    folder = run(np.arange(sum(SIZES)) % 4, "fedavg")
    page = write_report([folder, folder], tmp_path / "both.html").read_text()
    assert "<title>run vs run</title>" in page
    assert page.count("<h2>Clients: run</h2>") == 2


def test_a_page_that_cannot_be_written_is_one_line(run, tmp_path):
    folder = run(np.arange(sum(SIZES)) % 4, "fedavg")
    with pytest.raises(RunError, match="--out: .* cannot be written"):
        write_report([folder], tmp_path / "nowhere" / "report.html")


def test_a_best_round_chosen_on_validation_samples_says_so(run):
    flags = ("--validation-fraction", "0.3")
    page = (run(np.arange(sum(SIZES)) % 4, "fedavg", *flags) / "report.html").read_text()
    assert "the best validation.accuracy, chosen on validation data." in page
    assert "The best value was chosen on test data" not in page
    assert "validation accuracy" in page
    assert "dotted: validation samples" in page
