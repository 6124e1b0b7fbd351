"""Hypothesis profiles: `ci`, repeatable, by default, `thorough` for the long run."""

import os

from hypothesis import settings

settings.register_profile("ci", max_examples=500, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=5000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
