"""The script that ends the demo."""

import re
import runpy
from pathlib import Path

import pytest

ASK = Path(__file__).parents[1] / "examples" / "ask.py"
TINY = ("--clients", "2", "--train-per-class", "5", "--test-per-class", "3", "--rounds", "1")


def test_models_are_asked_about_digits_and_a_letter(bfl, tmp_path, capsys):
    small = (*TINY, "--data", "mnist5k", "--workers", "1", "--local-epochs", "2", "--quiet")
    for name in ("one", "two"):
        assert bfl("run", "fedavg", *small, "--out", str(tmp_path / name))[0] == 0
    main = runpy.run_path(str(ASK))["main"]
    main(str(tmp_path / "asked.png"), str(tmp_path / "one"), str(tmp_path / "two"))
    out = capsys.readouterr().out
    assert len(re.findall(r"asked about three images:", out)) == 2
    assert len(re.findall(r"  a usual \d +\d \(\d+ %\).* less certain than on +0 %", out)) == 2
    assert len(re.findall(r"  an unusual \d ", out)) == 2
    assert out.count("the letter K") == 2
    assert (tmp_path / "asked.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("probabilities", "said"),
    [([0.05, 0.95], "1 (95 %)"), ([0.3, 0.6, 0.1], "1 (60 %), 0 (30 %), 2 (10 %)")],
)
def test_likely_digits_come_first_and_unlikely_ones_are_left_out(probabilities, said):
    assert runpy.run_path(str(ASK))["guesses"](probabilities) == said
