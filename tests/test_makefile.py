"""The Makefile tells what it can do, and its demo compares like with like."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bflcore.registry.loading import load_registry

ROOT = Path(__file__).parents[1]
needs_make = pytest.mark.skipif(not shutil.which("make"), reason="needs make")


def made(*words):
    """Return what make prints, also where these tests run within make."""
    alone = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    command = ["make", "--no-print-directory", *words]
    shown = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True)
    return shown.stdout


def demo(*words):
    """Return the demo's runs: method -> flags; `--out` is checked and left out."""
    shown = made("-n", "demo", "LIGHT=", *words)
    runs = re.findall(r"bfl run (\S+) (.*) --out runs/demo-(\S+)", shown)
    assert all(method == folder for method, _, folder in runs)
    return {method: flags for method, flags, _ in runs}


@needs_make
def test_the_demo_compares_personalised_methods_under_the_same_flags():
    runs = demo()
    assert len(runs) == 3
    assert len(set(runs.values())) == 1
    methods = load_registry().methods
    assert {methods[method].share for method in runs} == {"body"}


@needs_make
def test_a_quick_look_compares_nothing_that_has_not_converged():
    shown = made("-n", "demo", "LIGHT=", "ROUNDS=3")
    assert "bfl compare" not in shown
    assert "3 rounds: a quick look" in shown
    assert [*demo("ROUNDS=3")] == ["bpfed"]
    assert len(demo("ROUNDS=40")) == 3


@needs_make
@pytest.mark.parametrize("words", [(), ("ROUNDS=3",)], ids=["whole", "quick"])
def test_the_demo_ends_on_a_prediction(words):
    last = made("-n", "demo", "LIGHT=", *words).splitlines()[-1]
    assert re.search(r"examples/ask.py \S+ runs/demo-bpfed", last)
    assert (ROOT / "examples" / "ask.py").is_file()


@needs_make
def test_the_demo_shows_what_it_installs_and_installs_what_it_needs():
    shown = made("-n", "demo", "READY=none", "LIGHT=Makefile.none")
    installs = shown.partition("-m pip install")[2].partition("touch")[0]
    assert "--quiet" not in installs
    assert re.findall(r"-e (\S+)", installs) == ["'.[data]'", "plugins/bpfed", "plugins/baselines"]


@needs_make
def test_readme_shows_the_demos_runs():
    table = re.findall(
        r"^demo-(\S+) +(\S+) +(\d+) ", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    rounds = re.search(r"--rounds (\d+)", next(iter(demo().values())))[1]
    assert table == [(method, method, rounds) for method in demo()]


@needs_make
def test_help_lists_every_target():
    (declared,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = made("help").splitlines()
    listed = [line.split()[1] for line in shown]
    assert sorted(listed) == sorted(declared.split())
    assert all(len(line.split()) > 2 for line in shown)
