"""The command line as a fixture, also where these tests run without the core's."""

from bflcore.cli.fixture import bfl

__all__ = ["bfl"]
