"""The Makefile tells what it can do."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_help_lists_every_target():
    (declared,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = ["make", "--no-print-directory", "help"]
    alone = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}  # also within make
    shown = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True)
    listed = [line.split()[1] for line in shown.stdout.splitlines()]
    assert sorted(listed) == sorted(declared.split())
    assert all(len(line.split()) > 2 for line in shown.stdout.splitlines())
