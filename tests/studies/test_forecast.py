"""Before the first run, data are loaded and the metrics are known that runs will record."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import bflcore
from bflcore import DataError
from bflcore.data.sources import Synthetic
from bflcore.studies.cells import Cell
from bflcore.studies.execution import execute
from bflcore.studies.trials import final_metrics

from .quick import FLAGS, OPTIONS, cell

WHOLE = {"novel_clients": 1, "calibration_fraction": 0.3, "validation_fraction": 0.3}
DIGITS = {"data": "mnist5k", "clients": 2, "train_per_class": 2, "test_per_class": 2}


class StoppedError(Exception):
    """Raised once the names are known, so that nothing is run."""


def ahead(cells, folder):
    """Return the names that the cells' runs will record."""
    known = set()

    def stop(names):
        known.update(names)
        raise StoppedError

    with pytest.raises(StoppedError):
        execute(cells, (0,), folder, check=stop)
    return known


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (FLAGS | WHOLE, OPTIONS),
        (FLAGS | {"share": "body"}, OPTIONS | {"dataset.classes": 4}),
        (FLAGS | WHOLE, OPTIONS | {"dataset.classes": 0, "dataset.samples": 200}),
        (DIGITS | {"rounds": 1, "local_epochs": 1, "model": "linear"}, {}),
    ],
)
def test_the_names_are_those_that_a_run_records(tmp_path, flags, options):
    expected = ahead([Cell("a", "fedavg", flags, options)], tmp_path / "study")
    run = bflcore.run("fedavg", out=tmp_path / "run", options=options, workers=1, **flags)
    assert expected == {*final_metrics(run.summary)}
    assert not (tmp_path / "study").exists()


def test_each_data_set_is_loaded_once_and_only_for_runs_that_are_due(tmp_path, monkeypatch):
    loaded, load = [], Synthetic.load
    monkeypatch.setattr(
        Synthetic, "load", lambda self, *given: loaded.append(self.samples) or load(self, *given)
    )
    cells = [cell("a"), cell("b", "fedvi"), cell("c", options={"dataset.samples": 21})]
    ahead(cells, tmp_path)
    assert loaded == [20, 21]
    execute([cells[0]], (0,), tmp_path, jobs=1)
    loaded.clear()
    assert "personal.nll" in ahead([cells[0]], tmp_path)
    assert loaded == []


def test_data_that_are_absent_or_wrong_are_refused_before_anything_is_written(tmp_path):
    odd = {"x": np.zeros((4, 2)), "y": np.zeros(3)}
    for data, message in (
        (tmp_path / "absent.npz", "cell b: --data: .* does not exist"),
        (odd, "cell b: data: x has 4 samples, y has 3"),
    ):
        with pytest.raises(DataError, match=message):
            execute([cell("a"), Cell("b", "fedavg", {"data": data})], (0,), tmp_path / "study")
    assert not (tmp_path / "study").exists()


PLUGIN = """
    from pathlib import Path
    import numpy as np
    from bflcore import DataError, hookimpl
    from bflcore.data import Dataset, DataSource
    from bflcore.options import component

    @component
    class Distant(DataSource):
        '''Data that are downloaded.'''

        name = "distant"

        def load(self, folder=None, download=False):
            if download:
                with (folder / "log").open("a") as file:
                    file.write("downloaded\\n")
            if not (folder / "log").exists():
                raise DataError("distant is not here; add --download")
            return Dataset(self.name, "classification", np.eye(40, 3, dtype=np.float32),
                           np.arange(40) % 2, 2)

    @hookimpl
    def bfl_datasets():
        yield Distant
"""


def test_what_is_downloaded_is_there_before_a_worker_starts(tmp_path):
    info = tmp_path / "bfl_distant-1.dist-info"
    info.mkdir()
    (tmp_path / "bfl_distant.py").write_text(textwrap.dedent(PLUGIN))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bfl-distant\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[bfl]\ndistant = bfl_distant\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    words = (
        "fedavg",
        "--data",
        "distant",
        "--data-dir",
        ".",
        "--clients",
        "2",
        "--model",
        "linear",
    )
    words += (
        "--model",
        "linear",
        "--rounds",
        "1",
        "--seeds",
        "0,1",
        "--jobs",
        "2",
        "--out",
        "s",
        "--quiet",
    )
    for more, expected in (((), 2), (("--download",), 0)):
        done = subprocess.run(
            [sys.executable, "-m", "bflcore.cli", "sweep", *words, *more],
            check=False,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == expected, done.stderr
        assert (tmp_path / "s").exists() is not bool(expected)
    assert (tmp_path / "log").read_text() == "downloaded\n"
