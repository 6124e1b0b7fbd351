"""Plugins that print, hang, exit or never end while they are loaded: named, and nothing breaks."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from bflcore.errors import PluginError
from bflcore.registry import builtin, importing
from bflcore.registry.importing import guarded
from bflcore.registry.loading import read_plugins


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(importing, "PATIENCE", 0.05)


def install(folder, name, source):
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[bfl]\n{module} = {module}\n")


def bfl(folder, *arguments):
    """Run the command line in a process of its own, with the distributions of a folder."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "bflcore.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
        cwd=folder,
        timeout=240,
    )


def state_of(registry, name):
    return next(plugin for plugin in registry.plugins if plugin.name == name)


def test_what_takes_long_is_named_while_it_lasts(impatient, monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    with guarded("bfl-slow", "bfl_slow.plugin"):
        time.sleep(0.3)
    assert said.getvalue() == (
        "waiting for plugin bfl-slow: bfl_slow.plugin has been loading for 0.05 s; if it hangs, "
        "press Ctrl-C and uninstall it: pip uninstall bfl-slow\n"
    )


def test_what_is_quick_is_not_mentioned(monkeypatch, capsys):
    monkeypatch.setattr(importing, "PATIENCE", 0.3)
    with guarded("bfl-quick", "bfl_quick"):
        pass
    time.sleep(0.4)
    assert capsys.readouterr() == ("", "")


def test_output_goes_to_standard_error(capsys):
    with guarded("bfl-loud", "bfl_loud"):
        sys.stdout.write("hello\n")
    assert capsys.readouterr() == ("", "hello\n")


def test_an_interruption_that_the_module_raises_is_its_own_error():
    with pytest.raises(PluginError, match="it raised KeyboardInterrupt"), guarded("bfl-x", "x"):
        raise KeyboardInterrupt


def test_an_interruption_by_the_user_passes_and_names_the_plugin(capsys):
    def load():
        with guarded("bfl-x", "bfl_x"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        load()
    assert capsys.readouterr().err == "interrupted while plugin bfl-x (bfl_x) was loading\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_plugins_load_outside_the_main_thread_too():
    found = []

    def load():
        with guarded("bfl-x", "bfl_x"):
            found.append(True)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert found == [True]


ENDLESS = """
from bflcore import Map, Method, hookimpl

class Mine(Method):
    '''Do it my way.'''
    name = "mine"
    inference = Map()

@hookimpl
def bfl_methods():
    while True:
        yield Mine
"""


def test_a_hook_without_end_breaks_its_plugin(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "bfl-aa-endless", ENDLESS)
    broken = state_of(read_plugins(builtin), "bfl-aa-endless")
    assert broken.reason == "bfl_methods yielded more than 1000 classes"


def test_a_plugin_that_prints_leaves_json_alone_and_one_that_interrupts_is_named(tmp_path):
    install(tmp_path, "bfl-aa-loud", "print('hello from the plugin')\n")
    install(tmp_path, "bfl-bb-rude", "raise KeyboardInterrupt\n")
    done = bfl(tmp_path, "list-plugins", "--json")
    assert done.returncode == 0, done.stderr
    states = {one["name"]: one["state"] for one in json.loads(done.stdout)}
    assert (states["bfl-aa-loud"], states["bfl-bb-rude"]) == ("ok", "broken")
    assert "hello from the plugin" in done.stderr


def test_a_distribution_called_as_the_core_is_breaks_itself_alone(tmp_path, monkeypatch):
    healthy = ENDLESS.replace("    while True:\n        yield", "    yield")
    install(tmp_path, "bfl-aa-fine", healthy)
    metadata = tmp_path / "bfl_aa_fine-1.2.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: bflcore>=0.1\n")
    install(tmp_path, "bflcore", "")
    (tmp_path / "bflcore.py").unlink()
    info = tmp_path / "bflcore-1.2.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("1.2", "0.0.1"))
    monkeypatch.syspath_prepend(tmp_path)
    registry = read_plugins(builtin)
    assert state_of(registry, "bfl-aa-fine").state == "ok"
    first, second = (plugin for plugin in registry.plugins if plugin.name == "bflcore")
    assert (first.state, second.state) == ("ok", "broken")
    assert second.reason == "its distribution is called bflcore, as the core is; rename it"


BAD = """
from __future__ import annotations
from bflcore import Map, Method, component, hookimpl, option

@component
class Bad(Map):
    '''Train as Map does, badly.'''

    name = "bad"
    {body}

class Badly(Method):
    '''Use it.'''
    name = "badly"
    inference = Bad()
    settings = {{"rounds": 1}}

@hookimpl
def bfl_inferences():
    yield Bad

@hookimpl
def bfl_methods():
    yield Badly
"""


def test_an_annotation_that_cannot_be_read_breaks_its_plugin(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "bfl-aa-typed", BAD.format(body='speed: Undefined = option(1.0, "speed")'))
    registry = read_plugins(builtin)
    assert "'Undefined' is not defined" in state_of(registry, "bfl-aa-typed").reason
    assert "badly" not in registry.methods


FAILING = {
    "check": "def check(self, problem): raise KeyError('lost')",
    "initial": "def initial(self, problem): raise KeyError('lost')",
    "initial_memory": "def initial_memory(self, problem): raise KeyError('lost')",
}


@pytest.mark.parametrize("hook", FAILING)
def test_a_hook_that_raises_in_a_run_gives_one_line_that_names_its_plugin(tmp_path, hook):
    install(tmp_path, "bfl-aa-bad", BAD.format(body=FAILING[hook]))
    small = ("--data", "digits", "--clients", "3", "--quiet", "--workers", "1", "--out", "run")
    done = bfl(tmp_path, "run", "badly", *small)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "error: plugin bfl-aa-bad 1.2 failed: unexpected KeyError: 'lost' at " in done.stderr
    assert "bfl_aa_bad.py:10; report it to its authors" in done.stderr
