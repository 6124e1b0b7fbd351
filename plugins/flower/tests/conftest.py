"""The command line as a fixture, also where these tests run without the core's."""

import pytest
from flwr.supercore.task_identity import TaskIdentity

from bflcore.cli.fixture import bfl

__all__ = ["bfl"]


@pytest.fixture
def identity(monkeypatch):
    """Give this process the identity that Flower gives its servers."""
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
