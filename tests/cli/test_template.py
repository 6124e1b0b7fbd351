"""The files of a new plugin."""

import ast

import pytest

from bflcore import OptionError, RunError
from bflcore.cli.template import COMMANDS, FILES, write_plugin


@pytest.mark.parametrize("kind", COMMANDS)
def test_every_template_is_written_with_all_names_filled_in(tmp_path, kind):
    folder = tmp_path / "bfl-fed-new"
    written = write_plugin("fed-new", folder, kind)
    assert len(written) == len(FILES)
    for path in folder.rglob("*"):
        assert "$" not in path.name
        if path.is_file():
            assert "$" not in path.read_text()
        if path.suffix == ".py":
            ast.parse(path.read_text())


@pytest.mark.parametrize("name", ["Fed", "fed_new", "2fed", "fed-", ""])
def test_a_name_that_is_not_lower_case_words_is_refused(tmp_path, name):
    with pytest.raises(OptionError, match="lower-case words joined by hyphens"):
        write_plugin(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_existing_folder_is_left_alone(tmp_path):
    with pytest.raises(RunError, match="exists"):
        write_plugin("fed-new", tmp_path)
    assert list(tmp_path.iterdir()) == []
