"""What a run that is cut short says and leaves."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter

import pytest

from bflcore.experiments.directory import RunDirectory

from ..interrupted import (
    TINY,
    quick,
    same,
)


def test_too_few_clients_leave_a_run_that_can_go_on(bfl, tmp_path):
    words = ("run", "fedavg", *TINY, *quick("fedavg"), "--quiet", "--drop-out", "0.3")
    status, _, err = bfl(*words, "--min-clients", "3", "--out", "cut")
    assert status == 2
    assert "3 are needed (--min-clients)" in err
    assert re.search("[0-9] rounds? (is|are) saved. Continue with: bfl resume cut$", err.strip())
    assert err.count("\n") == 1
    file = tmp_path / "cut" / "experiment.toml"
    file.write_text(file.read_text().replace("min_clients = 3", "min_clients = 1"))
    assert bfl("resume", "cut", "--quiet")[0] == 0
    assert bfl(*words, "--out", "whole")[0] == 0
    same(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_that_ends_the_run_says_how_to_go_on(bfl, tmp_path, monkeypatch, name):
    number, original = getattr(signal, name), RunDirectory.append

    def ended(self, record):
        original(self, record)
        if record["round"] == 4:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "append", ended)
        status, _, err = bfl("run", "fedavg", *TINY, *quick("fedavg"), "--quiet", "--out", "cut")
    assert status == 128 + number
    assert "rounds are saved. Continue with: bfl resume cut" in err
    assert signal.getsignal(number) is before
    assert bfl("resume", "cut", "--quiet") == (0, "", "")


def test_an_interruption_says_how_to_go_on(bfl, tmp_path, monkeypatch):
    original = RunDirectory.append

    def interrupt(self, record):
        if record["round"] == 4:
            raise KeyboardInterrupt
        original(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "append", interrupt)
        status, _, err = bfl("run", "fedavg", *TINY, *quick("fedavg"), "--quiet", "--out", "cut")
    assert status == 130
    assert "interrupted: 3 rounds are saved. Continue with: bfl resume cut" in err
    assert bfl("resume", "cut", "--quiet") == (0, "", "")


def test_rounds_in_which_nobody_replies_can_be_passed_over(bfl, tmp_path):
    words = ("run", "fedavg", *TINY, *quick("fedavg"), "--quiet", "--drop-out", "0.8")
    # The same faults come again on every resume.
    assert bfl(*words, "--min-clients", "1", "--out", "stopped")[0] == 2
    assert bfl(*words, "--out", "whole")[0] == 0
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    lost = Counter(entry["round"] for entry in summary["dropped"])
    assert 3 in lost.values()
    assert summary["rounds"] == 6
