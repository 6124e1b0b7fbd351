"""What a run prints: before, while and after it trains."""

import io
import re
import sys

import pytest

from bflcore.cli.progress import show_progress
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry

from .quick import QUICK


@pytest.fixture
def experiment():
    return resolve(load_registry(), "fedavg", {}, {"rounds": 4, "pretrain": 0.25})


def record(*dropped):
    return {"personal.accuracy": {"mean": 0.5, "pooled": 0.6}, "dropped": list(dropped)}


def test_evaluated_rounds_are_lines_and_others_are_not_shown(experiment, capsys):
    with show_progress(experiment, quiet=False) as progress:
        capsys.readouterr()
        progress(1, 0.7, None)
        assert capsys.readouterr().err == ""
        progress(2, 0.6, record())
    err = capsys.readouterr().err
    assert err.startswith("round 2/4  loss 0.600  personal.accuracy 0.5000")
    assert err.endswith(" s left\n")


def test_dropped_clients_are_named_with_their_reason(experiment, capsys):
    with show_progress(experiment, quiet=False) as progress:
        progress(2, 0.6, record({"round": 1, "client": 3, "reason": "loss is nan"}))
    assert "round 1: client 3 dropped: loss is nan\n" in capsys.readouterr().err


def test_pre_training_is_announced_unless_it_was_done_before(experiment, capsys):
    with show_progress(experiment, quiet=False):
        assert "25 %" in capsys.readouterr().err
    with show_progress(experiment, quiet=False, done=2):
        assert capsys.readouterr().err == ""


def test_a_quiet_run_prints_nothing(experiment, capsys):
    with show_progress(experiment, quiet=True) as progress:
        progress(2, 0.6, record({"round": 1, "client": 3, "reason": "loss is nan"}))
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("method", ["bpfed", "sgd-group-sparse"])
def test_a_bar_shows_round_bar_two_metrics_and_time_left(monkeypatch, columns, method):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    long = resolve(load_registry(), method, {}, {"rounds": 1000, "pretrain": 0.0})
    groups = {
        f"{g}.{n}": {"mean": 0.12345, "pooled": 0.5}
        for g in ("personal", "global")
        for n in ("accuracy", "ece", "nll")
    }
    with show_progress(long, quiet=False) as progress:
        for number in range(1, 4):
            progress(number, 1.5, {**groups, "dropped": []})
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    last = [line for line in re.split("[\r\n]", drawn) if line.strip()][-1]
    assert re.search(
        r" 3/1000 .*━━.* accuracy 0\.123\d ECE 0\.123\d .*(\d:\d\d:\d\d|-:--:--)$", last
    )
    assert last.startswith(method[:6])
    assert "…" not in last
    assert len(last) <= columns


def test_a_run_begins_with_what_it_is_and_ends_with_its_metrics(bfl, tmp_path):
    status, out, err = bfl("run", "fedavg", *QUICK, "--out", "run")
    assert status == 0
    first, second = err.splitlines()[:2]
    assert first == (
        "fedavg on synthetic: 3 clients (natural), 72 training and 18 test samples, 7110 parameters"
    )
    assert second == "2 rounds, 1 worker; results in run"
    assert [line.split()[0] for line in out.splitlines()[:2]] == ["metric", "accuracy"]
    assert "Worst client: " in out
    assert out.splitlines()[-2:] == ["run directory: run", "report: run/report.html"]
    assert max(map(len, out.splitlines())) <= 100


def test_foreign_samples_of_another_shape_are_refused_before_anything_is_written(bfl, tmp_path):
    flags = ("--data", "mnist5k", "--clients", "2", "--train-per-class", "2", "--rounds", "1")
    more = ("--test-per-class", "1", "--local-epochs", "1", "--workers", "1", "--ood", "digits")
    status, _, err = bfl("run", "fedavg", *flags, *more, "--out", "shapes")
    assert status == 2
    assert "--ood: digits has samples of shape [1, 8, 8], but mnist5k has [1, 28, 28]" in err
    assert not (tmp_path / "shapes").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_what_a_client_says_is_neither_markup_nor_a_command_to_the_terminal(
    experiment, monkeypatch, terminal
):
    reason = "[/x] [bold]loud[/bold] \x1b[2J\n" + 3000 * "y"
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "4000")
    with show_progress(experiment, quiet=False) as progress:
        progress(2, 0.6, record({"round": 1, "client": 3, "reason": reason}))
    said = stream.getvalue()
    assert "[/x] [bold]loud[/bold]" in said
    assert "\x1b[2J" not in said
    assert 400 < said.count("y") < 600
