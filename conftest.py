"""What all tests share, the plugins' too: hypothesis profiles, and the command line as a fixture.

Profile `ci` is repeatable and the default; `thorough` is for the long run.
"""

import os

import pytest
from hypothesis import settings

settings.register_profile("ci", max_examples=500, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=5000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def bfl(capsys, tmp_path, monkeypatch):
    """Run a command in an empty folder; return exit status, standard output and error."""
    from bflcore.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return run
