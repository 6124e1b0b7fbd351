"""``bfl new-plugin`` and ``bfl check-plugin``, as the author of a plugin meets them."""

import inspect
import json
import os
import runpy
import shlex
import sys
import tomllib

import pytest

from bflcore.cli.template import COMMANDS
from bflcore.registry.loading import load_registry


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Make the registry read fake distributions; load it afresh before and after."""

    def install(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"bfl_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bfl-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[bfl]\n{name} = {name}\n")
        load_registry.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    load_registry.cache_clear()


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_new_plugin_of_any_kind_is_complete_and_passes_its_checks_and_tests(
    bfl, tmp_path, monkeypatch, kind
):
    status, out, err = bfl("new-plugin", f"fed-{kind}ed", "--kind", kind)
    assert status == 0, err
    folder, module = tmp_path / f"bfl-fed-{kind}ed", f"bfl_fed_{kind}ed"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["bfl"] == {f"fed-{kind}ed": f"{module}.plugin"}
    info = folder / f"{module}-0.1.0.dist-info"  # installed as pip would
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (info / "entry_points.txt").write_text(f"[bfl]\nfed-{kind}ed = {module}.plugin\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    load_registry.cache_clear()
    try:
        status, checked, err = bfl("check-plugin", f"fed-{kind}ed")
        assert (status, err) == (0, ""), checked
        tests = runpy.run_path(str(folder / "tests" / f"test_fed_{kind}ed.py"))
        for name, test in tests.items():
            if name.startswith("test_"):
                test(*[tmp_path] * len(inspect.signature(test).parameters))
        command = shlex.split(out.partition("      ")[2].partition(" && ")[0])
        assert command[:2] == ["bfl", "run"]
        status, _, err = bfl(*command[1:], "--rounds", 1, "--workers", 1, "--quiet", "--clients", 3)
        assert (status, err) == (0, "")
    finally:
        load_registry.cache_clear()
        for name in [name for name in sys.modules if name.startswith(module)]:
            monkeypatch.delitem(sys.modules, name)


def test_the_prefix_of_the_distribution_is_not_part_of_the_name(bfl, tmp_path):
    assert bfl("new-plugin", "bfl-foo")[0] == 0
    assert (tmp_path / "bfl-foo" / "bfl_foo" / "foo.py").is_file()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Fed_X", "allowed: lower-case words joined by hyphens"),
        ("../up", "allowed: lower-case words"),
        ("bpfed", "is taken: method bpfed of bfl-bpfed"),
        ("variational", "is taken: inference variational of bflcore"),
    ],
)
def test_a_name_that_cannot_be_is_refused(bfl, tmp_path, name, said):
    status, _, err = bfl("new-plugin", name)
    assert status == 2
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_left_alone(bfl, tmp_path):
    (tmp_path / "bfl-mine").mkdir()
    status, _, err = bfl("new-plugin", "mine")
    assert status == 2
    assert "exists; choose another folder with --out" in err
    assert not list((tmp_path / "bfl-mine").iterdir())


WRONG = """
from bflcore import HyperUpdate, Broadcast, component, hookimpl, option

@component
class Stale(HyperUpdate):
    '''Forget to count rounds.'''

    name = "stale"
    reference = "new"
    families = ("point",)

    def update(self, broadcast, fused, total):
        return Broadcast(broadcast.round, fused, broadcast.prior)

@hookimpl
def bfl_hyper_updates():
    yield Stale
"""


def test_a_check_that_fails_is_shown_and_exits_with_1(bfl, installed):
    installed("stale", WRONG)
    status, out, err = bfl("check-plugin", "stale")
    assert status == 1, err
    assert "failed  rounds are counted: after round 0 comes 0" in out
    assert out.splitlines()[-1].endswith("1 failed")
    status, out, _ = bfl("check-plugin", "bfl-stale", "--json")
    rows = json.loads(out)
    assert status == 1
    assert [row["check"] for row in rows if row["state"] == "failed"] == ["rounds are counted"]


def test_an_expected_failure_is_shown_with_its_reason_and_exits_with_0(bfl, installed):
    promise = 'families = ("point",)\n    expected_failures = {"rounds are counted": "never"}\n'
    installed("patient", WRONG.replace('families = ("point",)', promise))
    status, out, err = bfl("check-plugin", "patient", "--all")
    assert status == 0, err
    assert "expected failure  rounds are counted: never" in out
    assert "ok  is frozen" in out


def test_a_broken_plugin_exits_with_1_and_the_reason(bfl, installed):
    installed("broken", "import no_such_module")
    status, _, err = bfl("check-plugin", "broken")
    assert status == 1
    assert "bfl-broken 1.0 is broken: ModuleNotFoundError" in err


def test_an_unknown_plugin_is_answered_with_the_nearest(bfl):
    status, _, err = bfl("check-plugin", "bpfd")
    assert status == 2
    assert "did you mean bfl-bpfed?" in err


FAULTY = """
import attrs
from bflcore import Aggregator, Map, Method, Posterior, Fixed, Variational, component, hookimpl

class Broken(Posterior):
    '''Fail at everything.'''
    name = "broken"
    def pack(self, prefix=""): raise RuntimeError("broken")
    def sample(self, noise): raise RuntimeError("broken")
    def kl(self, other): raise RuntimeError("broken")
    @classmethod
    def arbitrary(cls, layout, clients, noise): raise RuntimeError("broken")

@component
class Failing(Variational):
    '''Fail at every fit.'''
    name = "failing"
    def fit(self, problem, broadcast, cohort): raise RuntimeError("broken")

class Fails(Method):
    '''Use other people's update.'''
    name = "fails"
    inference = Failing()

@hookimpl
def bfl_posteriors(): yield Broken
@hookimpl
def bfl_inferences(): yield Failing
@hookimpl
def bfl_methods(): yield Fails
"""
RIGHT = WRONG.replace("broadcast.round,", "broadcast.round + 1,")
ANY = (
    RIGHT.replace('families = ("point",)', "")
    + """
from bflcore import Average

@component
class Mean(Average):
    '''Average any family.'''
    name = "mean"

@hookimpl
def bfl_aggregators():
    yield Mean
"""
)


@pytest.mark.parametrize("source", [RIGHT, ANY], ids=["one family", "any family"])
def test_a_right_part_passes_whatever_faulty_plugins_are_installed(bfl, installed, source):
    name = "right" if source is RIGHT else "anyright"
    installed("faulty", FAULTY)
    installed(name, source)
    status, out, err = bfl("check-plugin", name)
    assert (status, err) == (0, ""), out
    unclaimed = "not checked, because mean does not claim them: adds-evidence, robust, "
    assert (unclaimed in out) == (source is ANY)
    assert bfl("check-plugin", "faulty")[0] == 1
