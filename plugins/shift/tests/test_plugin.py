"""The command is registered, and listing it imports neither torch nor scipy."""

import subprocess
import sys

from bfl_shift.plugin import ShiftCommand, bfl_commands
from bflcore.registry.loading import load_registry
from bflcore.testing import parametrize_with_checks


@parametrize_with_checks([ShiftCommand])
def test_conformance(check):
    check.function()


def test_the_command_is_registered():
    assert [*bfl_commands()] == [ShiftCommand]
    assert load_registry().of("command")["shift"] is ShiftCommand
    assert ShiftCommand().build().name == "shift"


def test_the_help_of_the_command_imports_neither_torch_nor_scipy():
    code = (
        "import sys\nfrom bflcore.cli import main\n"
        "try: main(['shift', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'scipy', 'matplotlib'} & sys.modules.keys(), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--shifts" in done.stdout
