"""The layers hold, an import against them is noticed, and the page about them is up to date."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lint_imports(folder):
    """Check the contracts of pyproject.toml on the packages in `folder`."""
    places = [folder, *sorted((ROOT / "plugins").iterdir())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    command += ["--config", str(ROOT / "pyproject.toml")]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("randomness.py", "from bflcore.rounds import run_round", "from the lines below its own"),
        ("inference/memory.py", "import bflcore.inference.base", "There is no import cycle"),
        ("options/text.py", "import bfl_bpfed", "The core does not know any plugin"),
    ],
)
def test_a_planted_import_breaks_its_contract(tmp_path, module, line, contract):
    shutil.copytree(ROOT / "bflcore", tmp_path / "bflcore")
    planted = tmp_path / "bflcore" / module
    planted.write_text(f"{planted.read_text(encoding='utf-8')}\n\n{line}\n", encoding="utf-8")
    found = lint_imports(tmp_path)
    assert found.returncode == 1, found.stdout + found.stderr
    broken = [one for one in found.stdout.splitlines() if one.endswith(" BROKEN")]
    assert any(contract in one for one in broken), broken


def test_the_page_is_what_the_code_says():
    command = [sys.executable, str(ROOT / "docs" / "draw_architecture.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or "run: python docs/draw_architecture.py"
