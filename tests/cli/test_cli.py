"""The command line as a whole: its commands, its help, its exit status."""

import subprocess
import sys

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
