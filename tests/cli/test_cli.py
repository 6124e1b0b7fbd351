"""The command line as a whole: its commands, its help, its exit status."""

import io
import logging
import subprocess
import sys
from contextlib import contextmanager

import pytest

from bflcore.cli import COMMANDS


def test_help_lists_every_command_with_the_first_line_of_its_own_help(bfl):
    text = " ".join(bfl("--help")[1].split())
    for name, (_, line) in COMMANDS.items():
        assert f"{name} {line}" in text, name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(bfl, name):
    status, out, _ = bfl(name, "--help")
    assert status == 0
    assert f"Usage: bfl {name}" in out


def test_the_version_is_that_of_the_package(bfl):
    from bflcore import __version__

    assert __version__ in bfl("--version")[1]


def test_the_package_runs_as_a_module():
    words = [sys.executable, "-m", "bflcore.cli", "rn"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "did you mean run?" in found.stderr


@pytest.mark.parametrize(
    "words", [("--debug", "show", "modle", "x"), ("show", "modle", "x", "--debug")]
)
def test_debug_shows_the_traceback_before_the_line_wherever_it_stands(bfl, words):
    status, _, plain = bfl("show", "modle", "x")
    found, _, error = bfl(*words)
    assert (found, status) == (2, 2)
    assert plain.count("\n") == 1
    assert error.startswith("Traceback")
    assert "bflcore/cli/listing.py" in error
    assert error.splitlines()[-1] == plain.strip()


@contextmanager
def caught_log():
    """Catch what the logger writes: pytest's own handler keeps it from standard error."""
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger("bflcore").addHandler(handler)
    try:
        yield handler.stream
    finally:
        logging.getLogger("bflcore").removeHandler(handler)


FAILING = """
from torch import nn

class Fragile(nn.Linear):
    def forward(self, x):
        if len(x) > 8:
            raise ArithmeticError("too many samples")
        return super().forward(x)

def build(input_shape, outputs):
    return Fragile(input_shape[0], outputs)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_debug_shows_the_traceback_of_a_client_from_its_worker(bfl, tmp_path, monkeypatch, workers):
    (tmp_path / "fragile_net.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    logger = logging.getLogger("bflcore")
    monkeypatch.setattr(logger, "level", logger.level)
    flags = ("--data", "synthetic", "--clients", 2, "--rounds", 1, "--model", "fragile_net:build")
    words = ("run", "fedavg", *flags, "--workers", workers, "--quiet", "--out")
    status, _, plain = bfl(*words, "a")
    assert status == 2
    assert "Traceback" not in plain
    with caught_log() as written:
        status, _, error = bfl("--debug", *words, "b")
    assert status == 2
    text = written.getvalue()
    assert text.count('fragile_net.py", line 7, in forward') == 2  # both clients
    assert text.count("ArithmeticError: too many samples") >= 2
    assert error.splitlines()[-1].startswith("error: round 1: 0 of 2 clients")


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (ZeroDivisionError("division by zero"), 1, "error: unexpected ZeroDivisionError: division"),
        (RecursionError("deep"), 1, "error: unexpected RecursionError: deep at "),
        (MemoryError(), 2, "error: there is not enough memory; use less data"),
    ],
)
def test_a_defect_is_one_line_and_its_traceback_is_there_on_request(
    bfl, monkeypatch, raised, status, said
):
    def fail(*_, **__):
        raise raised

    monkeypatch.setattr("bflcore.cli.listing.load_registry", fail)
    found, out, error = bfl("list", "method")
    assert (found, out, error.count("\n")) == (status, "", 1)
    assert error.startswith(said)
    assert "Traceback" not in error
    assert "Traceback" in bfl("list", "method", "--debug")[2]
