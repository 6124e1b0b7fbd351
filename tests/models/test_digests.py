"""A user's own data and network are recognised when they change."""

import numpy as np

from bflcore.data.tables import Table
from bflcore.data.user import Arrays
from bflcore.models.digests import source_digests
from bflcore.studies.cells import Cell
from bflcore.studies.execution import resolve_cells


def digests(own=None, **flags):
    found = resolve_cells([Cell("a", "fedavg", flags)])["a"]
    return source_digests(found.dataset, found.data, found.model, own)


def test_a_built_in_data_set_and_network_have_no_digest():
    assert digests(data="digits") == {}


def test_a_file_and_a_folder_are_known_by_their_content(tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "a.csv").write_text("x,y\n1,2\n")
    first, of_file = digests(data=folder), digests(data=folder / "a.csv")
    assert first != of_file
    assert digests(data=folder) == first
    (folder / "b.csv").write_text("")
    second = digests(data=folder)
    (folder / "b.csv").rename(folder / "c.csv")
    assert len({str(found) for found in (first, second, digests(data=folder))}) == 3
    assert digests(data=folder / "a.csv") == of_file
    assert digests(data=tmp_path / "absent.csv") == {}


def test_data_that_python_holds_are_known_by_their_values():
    def of(own):
        return digests(own, data="memory")["content of the data"]

    texts = np.array(["a", "bc"], dtype=object)
    found = [
        of(Table({"x": np.arange(3.0)})),
        of(Table({"x": np.arange(3)})),
        of(Table({"y": np.arange(3.0)})),
        of(Arrays({"x": np.arange(3.0).reshape(3, 1)})),
        of(Table({"x": texts})),
        of(Table({"x": np.array(["a", "bd"], dtype=object)})),
    ]
    assert len(set(found)) == len(found)
    assert of(Table({"x": np.array(["a", str(b"bc", "ascii")], dtype=object)})) == found[4]


def test_a_network_is_known_by_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nets_of_sources.py"
    path.write_text("def network(input_shape, outputs): ...\n")
    first = digests(data="digits", model="nets_of_sources.py:network")
    path.write_text("def network(input_shape, outputs): ...  # changed\n")
    second = digests(data="digits", model="nets_of_sources.py:network")
    assert first["content of the model's file"] != second["content of the model's file"]
