"""The files of a new plugin: what ``bfl new-plugin`` writes."""

from __future__ import annotations

import re
import shutil
from importlib.resources import files
from pathlib import Path
from string import Template

from bflcore import __version__
from bflcore.errors import OptionError, RunError, WriteError
from bflcore.files import make_folder, write_text
from bflcore.options.kinds import kind_called

__all__ = ["COMMANDS", "write_plugin"]

# Where each template goes; `$kind` is in the name of those that differ between kinds.
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "init.py": "$package/__init__.py",
    "$plugin.py": "$package/plugin.py",
    "$kind.py": "$package/$module.py",
    "py.typed": "$package/py.typed",
    "test_conformance.py": "tests/test_${module}_conformance.py",
    "$test.py": "tests/test_${module}.py",
}
# What `bfl new-plugin --kind` writes, and a command that uses it. An inference comes with a method.
COMMANDS = {
    "inference": "bfl run $name --data synthetic",
    "method": "bfl run $name --data synthetic",
    "aggregator": "bfl run fedvi --aggregator $name --data synthetic",
    "hyper": "bfl run fedvi --hyper $name --data synthetic",
    "dataset": "bfl run fedavg --data $name",
    "model": "bfl run fedavg --model $name --data synthetic",
}


def write_plugin(name: str, folder: Path, kind: str = "inference") -> list[Path]:
    """Write the distribution ``bfl-NAME`` to `folder`, which must not exist; return its files.

    `kind` is a key of `COMMANDS`: what the distribution contributes.

    Raises `OptionError` for a name that is not allowed, `RunError` if the folder exists, and
    `WriteError`, leaving nothing, if a file cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise OptionError(
            f"NAME: {name!r} is not allowed; allowed: lower-case words joined by hyphens, "
            "for example fed-laplace"
        )
    if folder.exists():
        raise RunError(f"{folder} exists; choose another folder with --out, or remove it")
    words, written = _words(name, kind), []
    try:
        for source, target in FILES.items():
            path = folder / Template(target).substitute(words)
            make_folder(path.parent, parents=True)
            template = Template(f"{source}.in").substitute(words)
            text = (files(__package__) / "files" / template).read_text(encoding="utf-8")
            write_text(path, Template(text).substitute(words))
            written.append(path)
    except WriteError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return written


def _words(name: str, kind: str) -> dict[str, str]:
    """Return what stands for each name in the templates."""
    module, called = name.replace("-", "_"), kind_called(kind)
    major, minor, *_ = __version__.split(".")
    part = "".join(word.capitalize() for word in name.split("-"))
    both = kind == "inference"
    return {
        "name": name,
        "kind": kind,
        "module": module,
        "package": f"bfl_{module}",
        "Class": part,
        "parts": f"{part}, {part}Inference" if both else part,
        "base": called.base,
        "hook": called.hook,
        "plugin": "plugin_inference" if both else "plugin",
        "test": "test_recipe" if kind == "method" else f"test_{kind}",
        "command": Template(COMMANDS[kind]).substitute(name=name),
        "requires": f">={major}.{minor},<{major}.{int(minor) + 1}",
    }
