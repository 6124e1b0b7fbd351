"""What a run imports before and while it trains: nothing that is slow and not needed."""

import subprocess
import sys

import pytest

from .quick import QUICK

# Together they take three seconds to import.
SLOW = ("torch._dynamo", "sklearn", "matplotlib", "pandas", "scipy", "mlxtend", "torchvision")
CODE = f"""
import sys
from bflcore.cli import main, execution, progress

def imported():
    return [name for name in {SLOW!r} if name in sys.modules]

def header(prepared, path):
    print("header", imported())

def final(path):
    print("final", imported())

execution.print_header, execution.print_final = header, final
main(sys.argv[1:])
"""


@pytest.mark.parametrize("data", [("--data", "digits"), ()], ids=["digits", "synthetic"])
def test_a_run_trains_before_anything_slow_is_imported(tmp_path, data):
    options = [word for word in QUICK if not data or not word.startswith(("-o", "dataset."))]
    words = ["run", "fedavg", *options, *data, "--out", str(tmp_path / "run")]
    if data:
        words += ["--partition", "iid"]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # The report, which needs matplotlib and scipy, is written between the two.
    assert done.stdout.splitlines()[0] == "header []"
    assert "final ['matplotlib', 'scipy']" in done.stdout
