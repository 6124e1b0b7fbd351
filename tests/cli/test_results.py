"""``bfl report`` and ``bfl compare``."""

import json

from .quick import QUICK


def test_reports_and_comparisons_of_several_runs(bfl, tmp_path):
    for method in ("fedavg", "bpfed"):
        assert bfl("run", method, *QUICK, "--out", method, "--quiet") == (0, "", "")
    status, out, _ = bfl("compare", "fedavg", "bpfed")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["run", "fedavg", "bpfed"]
    status, out, _ = bfl("compare", "fedavg", "--json")
    final = json.loads((tmp_path / "fedavg" / "summary.json").read_text())["final"]
    assert json.loads(out)[0]["accuracy"] == final["personal.accuracy"]["mean"]
    assert bfl("report", "fedavg", "bpfed", "--out", "both.html")[0] == 0
    page = (tmp_path / "both.html").read_text()
    assert page.count("<svg") == 3
    assert "fedavg, personal" in page
    for outside in ('src="http', 'href="http', "@import", "<script"):
        assert outside not in page
