"""``bfl report`` and ``bfl compare``."""

import json
import shutil

import pytest
import scipy.stats

from .quick import QUICK


def test_reports_and_comparisons_of_several_runs(bfl, tmp_path):
    for method in ("fedavg", "bpfed"):
        assert bfl("run", method, *QUICK, "--out", method, "--quiet") == (0, "", "")
    status, out, _ = bfl("compare", "fedavg", "bpfed")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["run", "fedavg", "bpfed", "Means,"]
    status, out, _ = bfl("compare", "fedavg", "--json")
    final = json.loads((tmp_path / "fedavg" / "summary.json").read_text())["final"]
    assert json.loads(out)[0]["accuracy"] == final["personal.accuracy"]["mean"]
    assert bfl("report", "fedavg", "bpfed", "--out", "both.html")[0] == 0
    page = (tmp_path / "both.html").read_text()
    # With two runs in the legend, and of each client small pictures of accuracy and of NLL.
    assert page.count("<svg") == 5 + 2 + 3 * 2
    assert page.count('aria-label="NLL of client') == 3
    assert page.count("</svg>fedavg</li>") == 1  # the legend
    for outside in ('src="http', 'href="http', "@import", "<script src"):
        assert outside not in page


def test_pooled_metrics_are_a_table_of_their_own(bfl, tmp_path):
    assert bfl("run", "fedavg", *QUICK, "--out", "fedavg", "--quiet") == (0, "", "")
    _, out, _ = bfl("compare", "fedavg", "--pooled", "--json")
    final = json.loads((tmp_path / "fedavg" / "summary.json").read_text())["final"]
    (row,) = json.loads(out)
    assert row["ECE"] == final["personal.ece"]["pooled"]
    assert row["AUROC"] == final["personal.auroc"]["pooled"]
    assert "std over clients" not in row
    assert (
        "Pooled: all clients' test samples counted alike."
        in bfl("compare", "fedavg", "--pooled")[1]
    )


def test_a_comparison_leaves_out_what_is_no_run_and_marks_what_is_unfinished(bfl, tmp_path):
    for name in ("whole", "cut"):
        assert bfl("run", "fedavg", *QUICK, "--out", name, "--quiet") == (0, "", "")
    (tmp_path / "cut" / "summary.json").unlink()
    (tmp_path / "broken").mkdir()
    status, out, err = bfl("compare", "whole", "cut", "broken")
    assert status == 0
    assert "left out: broken is not a run directory" in err
    assert "cut: round 2 of 2, unfinished: continue with: bfl resume cut" in out
    assert out.splitlines()[2].split()[:4] == ["cut", "fedavg", "2", "of"]
    status, _, err = bfl("report", "whole", "cut", "broken", "--out", "page.html")
    assert (status, err.count("left out: broken")) == (0, 1)
    assert "unfinished: continue with" in (tmp_path / "page.html").read_text()
    assert bfl("compare", "broken")[0] == 2


def test_clients_are_compared_with_what_they_reach_alone(bfl, tmp_path):
    alone = "alone"
    for name, more in (("fedavg", ()), (alone, ("--share", "none")), ("seed1", ("--seed", "1"))):
        assert bfl("run", "fedavg", *QUICK, *more, "--out", name, "--quiet") == (0, "", "")
    _, out, _ = bfl("compare", "fedavg", alone, "seed1", "--json")
    rows = {row["run"]: row for row in json.loads(out)}
    together, apart = (
        json.loads((tmp_path / name / "evaluation.json").read_text())["personal"]["clients"]
        for name in ("fedavg", alone)
    )
    pairs = [(a["accuracy"], b["accuracy"]) for a, b in zip(together, apart, strict=True)]
    assert rows["fedavg"][f"worse than {alone}"] == f"{sum(a < b for a, b in pairs)} of 3"
    mean = sum(a - b for a, b in pairs) / 3
    assert rows["fedavg"]["paired difference"] == pytest.approx(mean)
    error = scipy.stats.sem([a - b for a, b in pairs])
    assert rows["fedavg"]["± se"] == pytest.approx(error)
    out = bfl("compare", "fedavg", alone)[1]
    assert "Paired difference to alone: mean over clients ± its standard error (se)." in out
    assert out.splitlines()[0].split()[-4:] == ["paired", "difference", "±", "se"]
    assert f"worse than {alone}" not in rows["seed1"]  # other samples: not comparable
    status, _, err = bfl("compare", "seed1", "--against", alone)
    assert status == 2
    assert "cannot be compared client by client" in err


def test_options_that_would_have_no_effect_are_refused(bfl, tmp_path):
    for words, message in (
        (("--pooled", "--against", "b"), "--pooled has no clients; leave one of them out"),
        (("--json", "--format", "latex"), "--json and --format exclude each other"),
        (("--json", "--out", "a.csv"), "--json: a.csv is not a file .json"),
    ):
        status, out, err = bfl("compare", "a", *words)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_with_a_run_that_is_left_out_says_so(bfl, tmp_path):
    assert bfl("run", "fedavg", *QUICK, "--out", "x", "--quiet") == (0, "", "")
    shutil.copytree(tmp_path / "x", tmp_path / "again")
    shutil.copytree(tmp_path / "x", tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    for name, reason in (("again", "the same settings, data and seed as x"), ("cut", "unfinished")):
        status, out, err = bfl("compare", "x", "--against", name, "--over", "seeds")
        assert (status, out) == (2, "")
        assert reason in err.splitlines()[0]
        assert f"--against: {name} is left out; give one of the cells: x" in err.splitlines()[1]
    status, _, _ = bfl("compare", "x", "--metric", "personal.nll", "--json", "--out", "t.json")
    assert status == 0
    assert json.loads((tmp_path / "t.json").read_text())["against"] == "x"


def test_a_report_of_a_sweep_has_its_finished_runs_by_cell(bfl, tmp_path):
    grid = ("--grid", "lr=0.001,0.05", "--seeds", "0,3", "--out", "s", "--jobs", "1", "--quiet")
    status, _, err = bfl("sweep", "fedavg", *QUICK, *grid)
    assert status == 0, err
    (tmp_path / "s" / "fedavg,lr=0.05" / "seed-3" / "summary.json").unlink()
    status, out, err = bfl("report", "s", "--out", "page.html")
    assert (status, out) == (0, "report: page.html\n"), err
    assert err == "left out: 1 of the 4 runs of s: not finished\n"
    page = (tmp_path / "page.html").read_text()
    assert "<title>fedavg,lr=0.001/seed-0 vs fedavg,lr=0.001/seed-3 vs fedavg,lr=0.05/" in page
    assert all(f"</svg>fedavg,lr={rate}</li>" in page for rate in ("0.001", "0.05"))
    status, out, _ = bfl("compare", "s", "--metric", "personal.aurc")
    assert (status, out.splitlines()[1].split()[:2]) == (0, ["personal.aurc", "fedavg,lr=0.001"])
    # Beside another sweep with cells of the same names, and a run, each is told from the others.
    shutil.copytree(tmp_path / "s", tmp_path / "t")
    assert bfl("run", "fedavg", *QUICK, "--out", "alone", "--quiet") == (0, "", "")
    assert bfl("report", "s/results.json", "t", "alone", "--out", "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert all(f"{name}/fedavg,lr=0.05/seed-0" in page for name in "st")
    assert "</svg>alone</li>" in page


def test_a_report_of_a_sweep_without_a_finished_run_is_one_line(bfl, tmp_path):
    words = ("sweep", "fedavg", *QUICK, "--seeds", "0", "--out", "s", "--jobs", "1", "--quiet")
    assert bfl(*words)[0] == 0
    (tmp_path / "s" / "fedavg" / "seed-0" / "summary.json").unlink()
    status, out, err = bfl("report", "s")
    assert (status, out) == (2, "")
    assert err == "error: no run of s is finished; continue with: bfl sweep --resume s\n"
    (tmp_path / "s" / "study.json").write_text("{")
    status, _, err = bfl("report", "s")
    assert (status, len(err.splitlines())) == (2, 1)
    assert "study.json" in err
