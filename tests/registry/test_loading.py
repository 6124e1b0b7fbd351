"""Plugins as strangers ship them: real distributions on the path, healthy and broken."""

import json
import subprocess
import sys
import textwrap

import pytest

from bflcore import OptionError, PluginError
from bflcore.experiments.environment import used_distributions
from bflcore.experiments.resolve import resolve
from bflcore.registry import builtin
from bflcore.registry.loading import read_plugins

HEALTHY = """
    from bflcore import Map, Method, hookimpl

    class Mine(Method):
        '''Do it my way.'''
        name = "{name}"
        inference = Map()

    @hookimpl
    def bfl_methods():
        yield Mine
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution with one plugin module, as pip would lay it out."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, source, requires=""):
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n"
            + (f"Requires-Dist: {requires}\n" if requires else "")
        )
        (info / "entry_points.txt").write_text(f"[bfl]\n{module} = {module}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


def state_of(registry, name):
    return next(d for d in registry.plugins if d.name == name)


def test_a_healthy_plugin_is_found_by_name_with_its_distribution(install):
    install("bfl-aa-mine", HEALTHY.format(name="mine"))
    registry = read_plugins(builtin)
    assert registry.methods["mine"].summary() == "Do it my way."
    assert registry.owner("method", "mine") == "bfl-aa-mine"
    assert state_of(registry, "bfl-aa-mine").components == (("method", "mine"),)


def test_of_two_plugins_that_claim_a_name_neither_is_trusted(install):
    for name in ("bfl-aa-squatter", "bfl-bb-owner", "bfl-cc-third"):
        install(name, HEALTHY.format(name="wanted"))
    install("bfl-dd-fine", HEALTHY.format(name="fine"))
    registry = read_plugins(builtin)
    assert "wanted" not in registry.methods
    assert "fine" in registry.methods
    assert "fedavg" in registry.methods
    first, second, third = (
        state_of(registry, name) for name in ("bfl-aa-squatter", "bfl-bb-owner", "bfl-cc-third")
    )
    assert {one.state for one in (first, second, third)} == {"broken"}
    assert {one.components for one in (first, second, third)} == {()}
    assert "method 'wanted' is also registered by bfl-bb-owner; uninstall one" in first.reason
    assert "also registered by bfl-aa-squatter" in second.reason
    assert "also registered by bfl-aa-squatter" in third.reason
    with pytest.raises(OptionError, match="a plugin is broken: bfl list-plugins"):
        registry.methods["wanted"]


BROKEN = {
    "import": ("import a_module_that_does_not_exist", "ModuleNotFoundError: .*does_not_exist"),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "misspelt": (
        "from bflcore import hookimpl\n@hookimpl\ndef bfl_metods():\n    yield 1",
        "unknown hook bfl_metods .did you mean bfl_methods",
    ),
    "misspelt-unmarked": ("def bfl_agregators():\n    yield 1", "unknown hook bfl_agregators"),
    "iterating": (
        HEALTHY.format(name="half") + "        raise RuntimeError('halfway')\n",
        "RuntimeError: halfway",
    ),
    "not-a-class": (
        "from bflcore import hookimpl\n@hookimpl\ndef bfl_models():\n    yield 'mlp'",
        "bfl_models yielded 'mlp'; expected a subclass of bflcore.Model",
    ),
    "wrong-kind": (
        "from bflcore import FedAvg, hookimpl\n@hookimpl\ndef bfl_models():\n    yield FedAvg",
        "yielded <class .*FedAvg.>; expected a subclass of bflcore.Model",
    ),
    "duplicate": (
        HEALTHY.format(name="fedavg"),
        "method 'fedavg' is also registered by bflcore; uninstall one of the two, or rename it",
    ),
    "unmarked": (HEALTHY.format(name="half").replace("@hookimpl", ""), "bfl_methods is not marked"),
    "yields-forgotten": (HEALTHY.format(name="half").replace("yield", ""), "returned nothing"),
    "own-base": (
        (
            "from bflcore import hookimpl\nclass X:\n    kind = 'model'\n    name = 'half'\n"
            "@hookimpl\ndef bfl_models():\n    yield X"
        ),
        "expected a subclass of bflcore.Model",
    ),
    "base-of-another-kind": (
        (
            "from bflcore import Aggregator, hookimpl\nclass X(Aggregator):\n"
            "    kind = 'model'\n    name = 'half'\n@hookimpl\ndef bfl_models():\n    yield X"
        ),
        "expected a subclass of bflcore.Model",
    ),
    "misspelt-part": (
        HEALTHY.format(name="half").replace("inference =", "hypr = 1; inference ="),
        "^method half: unknown attribute 'hypr' .did you mean hyper",
    ),
    "no-name": (HEALTHY.format(name=""), "yielded Mine, which has no name"),
    "aliases-of-letters": (
        HEALTHY.format(name="half").replace("inference =", "aliases = 'xyz'; inference ="),
        "yielded Mine; its aliases must be a tuple",
    ),
    "unprintable": (
        "class Mute(Exception):\n    def __str__(self):\n        raise ValueError\nraise Mute",
        "^Mute$",
    ),
    "requires-a-number": ("BFLCORE_REQUIRES = 3", "BFLCORE_REQUIRES 3 is not a version specifier"),
    "newer-core": (
        "BFLCORE_REQUIRES = '>=99'\n" + textwrap.dedent(HEALTHY.format(name="future")),
        "needs bflcore>=99, but",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plugin_is_blamed_and_leaves_nothing_behind(install, how):
    source, reason = BROKEN[how]
    install("bfl-bb-broken", source)
    install("bfl-cc-fine", HEALTHY.format(name="fine"))
    registry = read_plugins(builtin)
    broken = state_of(registry, "bfl-bb-broken")
    assert broken.state == "broken"
    assert broken.components == ()
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(broken.reason)
    assert state_of(registry, "bfl-cc-fine").state == "ok"
    assert {"fine", "fedavg"} <= set(registry.methods)
    assert "half" not in registry.methods


def test_metadata_that_ask_for_another_core_mark_the_plugin_broken(install):
    install("bfl-dd-old", HEALTHY.format(name="old"), requires="bflcore<0.0.1")
    assert "needs bflcore<0.0.1" in state_of(read_plugins(builtin), "bfl-dd-old").reason


def test_every_requirement_of_the_core_in_the_metadata_counts(install):
    install("bfl-dd-old", HEALTHY.format(name="old"), requires="bflcore>=0.0.1")
    install(
        "bfl-ee-old",
        HEALTHY.format(name="elder"),
        requires="bflcore>=0.0.1\nRequires-Dist: bflcore<0.0.2",
    )
    registry = read_plugins(builtin)
    assert state_of(registry, "bfl-dd-old").state == "ok"
    assert "0.0.2" in state_of(registry, "bfl-ee-old").reason


def test_a_plugin_without_metadata_stops_nobody(install, tmp_path):
    install("bfl-dd-bare", HEALTHY.format(name="bare"))
    install("bfl-ee-fine", HEALTHY.format(name="fine"))
    (tmp_path / "bfl_dd_bare-1.2.dist-info" / "METADATA").unlink()
    registry = read_plugins(builtin)
    assert state_of(registry, "bfl_dd_bare").version == "?"
    assert {"bare", "fine"} <= set(registry.methods)


def test_malformed_entry_points_break_their_own_distribution_alone(install, tmp_path):
    install("bfl-dd-garbled", HEALTHY.format(name="garbled"))
    install("bfl-ee-fine", HEALTHY.format(name="fine"))
    entries = tmp_path / "bfl_dd_garbled-1.2.dist-info" / "entry_points.txt"
    entries.write_text("[bfl]\na line that is no entry\n")
    registry = read_plugins(builtin)
    assert "entry_points.txt is malformed" in state_of(registry, "bfl-dd-garbled").reason
    assert registry.methods["fine"]


def test_a_distribution_found_twice_is_loaded_once_from_its_first_place(
    install, tmp_path, monkeypatch
):
    install("bfl-aa-mine", HEALTHY.format(name="mine"))
    shadowed = tmp_path / "later" / "bfl_aa_mine-0.9.dist-info"
    shadowed.mkdir(parents=True)
    (shadowed / "METADATA").write_text("Metadata-Version: 2.1\nName: bfl_aa.mine\nVersion: 0.9\n")
    (shadowed / "entry_points.txt").write_text("[bfl]\nmine = bfl_aa_mine\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(shadowed.parent)])
    found = [d for d in read_plugins(builtin).plugins if d.module == "bfl_aa_mine"]
    assert [(d.version, d.state) for d in found] == [("1.2", "ok")]


def test_strict_mode_raises(install, monkeypatch):
    install("bfl-bb-broken", "import a_module_that_does_not_exist")
    monkeypatch.setenv("BFL_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError, match="bfl-bb-broken 1.2: ModuleNotFoundError"):
        read_plugins(builtin)


def test_an_unknown_name_is_answered_with_the_nearest():
    registry = read_plugins(builtin)
    with pytest.raises(OptionError, match=r"unknown method 'fedvag' \(did you mean fedavg\?\)"):
        registry.methods["fedvag"]
    with pytest.raises(OptionError, match="unknown kind 'metod'"):
        registry.of("metod")


def test_an_alias_finds_the_component_and_is_not_listed():
    registry = read_plugins(builtin)
    rules = registry.aggregators
    assert rules["nwa"] is rules["average"] is rules.get("nwa")
    assert "nwa" in rules
    assert "nwa" not in list(rules)
    assert len(rules) == len(list(rules)) == len(rules.values())
    assert list(rules) == sorted(rules)


def test_what_may_be_absent_is_asked_for_without_an_error():
    rules = read_plugins(builtin).aggregators
    assert rules.get("averge") is None
    assert "averge" not in rules


def test_a_plugin_may_contribute_a_likelihood_and_a_label_noise(install):
    source = """
        from bflcore import GaussianNoise, LabelNoise, Likelihood, component, hookimpl

        @component
        class Laplacian(Likelihood):
            name = "laplacian"
            task = "regression"
            def nll(self, outputs, targets): ...
            def predictive(self, outputs): ...

        @component
        class Next(LabelNoise):
            name = "next"
            def transition(self, classes): ...

        @hookimpl
        def bfl_likelihoods():
            yield Laplacian

        @hookimpl
        def bfl_label_noises():
            yield Next
    """
    install("bfl-aa-mine", source)
    registry = read_plugins(builtin)
    assert state_of(registry, "bfl-aa-mine").reason == ""
    file = {"data": {"label_noise": "next:0.2"}, "likelihood": {"name": "laplacian"}}
    experiment = resolve(registry, "fedavg", file, {})
    assert (experiment.likelihood.name, experiment.label_noise.eps) == ("laplacian", 0.2)
    assert used_distributions(experiment, registry) == {"bflcore", "bfl-aa-mine"}


def test_a_plugin_may_contribute_a_calibrator(install):
    source = """
        from bflcore import Calibrator, component, hookimpl, option

        @component
        class Platt(Calibrator):
            name = "platt"
            slope: float = option(1.0, "slope")
            def sums(self, predictive, y): ...

        @hookimpl
        def bfl_calibrators():
            yield Platt
    """
    install("bfl-aa-mine", source)
    registry = read_plugins(builtin)
    assert state_of(registry, "bfl-aa-mine").reason == ""
    file = {"data": {"calibration_fraction": 0.2}, "calibrator": {"platt": {"slope": 2.0}}}
    experiment = resolve(registry, "fedavg", file, {"calibrate": ("platt", "ood")})
    assert [one.name for one in experiment.calibrators] == ["platt", "ood"]
    assert (experiment.calibrators[0].slope, experiment.calibrators[0].scope) == (2.0, "federated")
    assert used_distributions(experiment, registry) == {"bflcore", "bfl-aa-mine"}


def test_the_command_line_names_broken_plugins_exits_0_and_never_imports_torch(tmp_path, install):
    install("bfl-bb-broken", "raise RuntimeError('boom')")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from bflcore.cli import main\n"
        "try: main(['list-plugins', '--json'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    states = {one["name"]: one["state"] for one in json.loads(done.stdout)}
    assert states["bfl-bb-broken"] == "broken"
    assert states["bflcore"] == "ok"


def test_loading_a_plugin_leaves_its_lazy_modules_alone(install):
    lazily = "from bflcore.lazy import lazy\ncolours = lazy('colorsys')\n"
    install("bfl-aa-lazy", lazily + textwrap.dedent(HEALTHY.format(name="lazily")))
    sys.modules.pop("colorsys", None)
    assert "lazily" in read_plugins(builtin).methods
    assert "colorsys" not in sys.modules
