"""What a run prints while it trains."""

import pytest

from bflcore.cli.progress import show_progress
from bflcore.experiments.resolve import resolve
from bflcore.registry.loading import load_registry


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
