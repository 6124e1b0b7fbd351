"""What several tests of experiments need."""

import pytest


@pytest.fixture
def stale_install(tmp_path, monkeypatch):
    """Put metadata of an earlier version of the core on the path, as an old install leaves them."""
    folder = tmp_path / "site" / "bflcore-0.0.1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: bflcore\nVersion: 0.0.1\n")
    monkeypatch.syspath_prepend(folder.parent)
