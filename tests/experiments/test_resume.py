"""Opening a run again."""

import numpy as np
import pytest

from bflcore import DataError, OptionError
from bflcore.data.user import Arrays
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.experiments.resume import reopen
from bflcore.registry.loading import load_registry

X = np.random.default_rng(0).normal(size=(40, 3))


def begun(path, x=X):
    """Create the directory of a run on data that Python holds."""
    flags = {"data": {"data": "memory", "clients": 2}}
    given = Arrays({"x": x, "y": np.arange(40) % 2})
    prepared = prepare(resolve(load_registry(), "fedavg", {}, flags), given)
    RunDirectory.create(path, prepared, load_registry())
    return given


def test_a_run_is_prepared_as_it_was(tmp_path):
    given = begun(tmp_path / "run")
    prepared, directory, changes = reopen(tmp_path / "run", load_registry(), given)
    assert (directory.path, changes) == (tmp_path / "run", [])
    assert prepared.experiment.data.clients == 2


def test_other_data_are_a_change_and_missing_ones_an_error(tmp_path):
    begun(tmp_path / "run")
    other = Arrays({"x": X + 1e-3, "y": np.arange(40) % 2})
    changes = reopen(tmp_path / "run", load_registry(), other)[2]
    assert changes == ["the data or its partition changed"]
    with pytest.raises(DataError, match="given from Python and are not kept; continue with"):
        reopen(tmp_path / "run", load_registry())


def test_a_file_without_a_method_is_refused(tmp_path):
    begun(tmp_path / "run")
    (tmp_path / "run" / "experiment.toml").write_text("rounds = 1\n")
    with pytest.raises(OptionError, match="experiment.toml: the key method is missing"):
        reopen(tmp_path / "run", load_registry())
