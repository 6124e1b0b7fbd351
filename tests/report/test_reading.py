"""Reading run directories: what is missing or malformed is named."""

import pytest

from bflcore.errors import RunError
from bflcore.experiments.directory import RunDirectory
from bflcore.report.reading import read_run


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="is not a run directory; give the folder"):
        read_run(tmp_path)


def test_a_run_that_has_not_finished_says_how_to_continue(tmp_path):
    (tmp_path / "experiment.toml").write_text("")
    RunDirectory(tmp_path).append({"round": 1})
    with pytest.raises(RunError, match="has not finished; .* continue it with: bfl resume"):
        read_run(tmp_path)
