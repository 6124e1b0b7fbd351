"""Hypothesis profiles of all tests, and the command line as a fixture.

Profile `ci` is repeatable and the default; `thorough` is for the long run.
"""

import os

from hypothesis import settings

from bflcore.cli.fixture import bfl

__all__ = ["bfl"]

settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
