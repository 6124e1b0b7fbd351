"""Resolving an experiment: who decides an option, and what is refused."""

import copy
import datetime as dt
from pathlib import Path

import attrs
import pytest

from bflcore import (
    BflError,
    FedAvg,
    GaussianNoise,
    IncompatibleError,
    Map,
    OptionError,
    Variational,
    component,
    option,
)
from bflcore.data.label_noise import Pair
from bflcore.experiments.resolve import Experiment, chosen_class, method_of, read, resolve
from bflcore.models import TwoNN
from bflcore.options.kinds import CONFIGURABLE, PARTS
from bflcore.problem.calibration.conformal import Conformal
from bflcore.registry.loading import Plugin, Registry, load_registry

SYNTHETIC = {"data": "synthetic"}
CALIBRATED = {"data": {"calibration_fraction": 0.2}}


def with_method(**members):
    """Return the installed components and a method with these class members."""
    found = Registry()
    loaded = load_registry()
    for plugin in loaded.plugins:
        found.add(plugin, [loaded.of(kind)[name] for kind, name in plugin.components])
    method = type("Mine", (FedAvg,), {"name": "mine", "__doc__": "Mine.", **members})
    found.add(Plugin("under test", "0", "tests"), [method])
    return found


def resolved(file=None, flags=None, method="fedavg"):
    return resolve(load_registry(), method, file or {}, flags or {})


@component
class Particular(Map):
    """A point that its options allow to be averaged equally, or not."""

    name = "particular"
    even: bool = option(False, "equal weights")

    def check_parts(self, parts):
        if self.even and parts["weighting"].name != "equal":
            found = ", ".join(parts[kind].name for kind in ("aggregator", "weighting", "hyper"))
            raise IncompatibleError(f"no: {found}")


def test_an_inference_may_refuse_parts_that_do_not_work_with_its_options():
    registry = with_method()
    registry.add(Plugin("particular", "0", "tests"), [Particular])
    even = {"inference": {"name": "particular", "even": True}}
    with pytest.raises(IncompatibleError, match="no: average, examples, fixed"):
        resolve(registry, "mine", even, {})
    assert resolve(registry, "mine", even, {"weighting": {"name": "equal"}}).inference.even
    assert not resolve(registry, "mine", {"inference": {"name": "particular"}}, {}).inference.even


def test_a_method_may_choose_the_model():
    registry = with_method(model=TwoNN())
    assert resolve(registry, "mine", {}, {}).model == TwoNN()
    assert resolve(registry, "mine", {}, {"model": {"name": "lenet"}}).model.name == "lenet"


def test_a_method_may_choose_the_likelihood():
    registry = with_method(likelihood=GaussianNoise(noise_variance=0.3))
    assert resolve(registry, "mine", {}, {}).likelihood == GaussianNoise(noise_variance=0.3)
    assert resolved().likelihood is None


def test_a_methods_setting_reaches_the_run_and_the_data():
    experiment = resolve(with_method(settings={"rounds": 7, "clients": 3}), "mine", {}, {})
    assert (experiment.run.rounds, experiment.data.clients) == (7, 3)


def test_flags_override_the_file_which_overrides_the_method():
    registry = with_method(inference=Map(lr=0.5, momentum=0.5, anchor=0.5), settings={"rounds": 7})
    file = {"rounds": 8, "inference": {"momentum": 0.6, "anchor": 0.6}}
    flags = {"rounds": 9, "inference": {"anchor": 0.7}}
    by_file, by_flags = resolve(registry, "mine", file, {}), resolve(registry, "mine", file, flags)
    assert by_file.inference == Map(lr=0.5, momentum=0.6, anchor=0.6)
    assert by_flags.inference == Map(lr=0.5, momentum=0.6, anchor=0.7)
    assert (by_file.run.rounds, by_flags.run.rounds) == (8, 9)


def test_another_part_drops_the_methods_and_the_files_options():
    registry = with_method(inference=Map(lr=0.5))
    file = {"inference": {"lr": 0.6}}
    flags = {"inference": {"name": "variational"}}
    assert resolve(registry, "mine", {}, flags).inference == Variational()
    file["inference"]["name"] = "map"
    assert resolve(registry, "mine", file, flags).inference == Variational()


def test_naming_the_methods_own_part_keeps_its_options():
    registry = with_method(inference=Map(lr=0.5))
    assert resolve(registry, "mine", {}, {"inference": {"name": "map"}}).inference == Map(lr=0.5)


def test_optimizer_is_stored_as_optimiser():
    experiment = resolved({"inference": {"optimizer": "sgd"}})
    assert experiment.inference.optimiser == "sgd"
    assert experiment.as_toml()["inference"]["optimiser"] == "sgd"
    assert "optimizer" not in experiment.as_toml()["inference"]


def test_a_data_sets_options_have_one_name_in_files_and_errors():
    experiment = resolved({"data": SYNTHETIC, "dataset": {"owners": 4}})
    assert experiment.dataset.owners == 4
    assert experiment.as_toml()["dataset"]["owners"] == 4
    with pytest.raises(OptionError, match=r"'dataset.onwers' \(did you mean dataset.owners\?\)"):
        resolved({"data": SYNTHETIC, "dataset": {"onwers": 4}})


def test_another_data_set_drops_the_files_options():
    file = {"data": SYNTHETIC, "dataset": {"owners": 4}}
    assert resolved(file, {"data": {"data": "digits"}}).dataset.name == "digits"
    assert resolved(file, {"data": SYNTHETIC}).dataset.owners == 4


def test_values_of_a_partition_may_stand_in_its_name_or_in_a_table():
    file = {"data": {"partition": "labels:5"}, "partition": {"k": 4}}
    assert resolved(file).partition.k == 4
    assert resolved(file, {"data": {"partition": "labels:3"}}).partition.k == 3
    assert resolved(file, {"partition": {"k": 2}}).partition.k == 2


def test_label_noise_takes_options_of_a_table():
    file = {"data": {"label_noise": "pair"}, "label-noise": {"eps": 0.3}}
    assert resolved(file).label_noise == Pair(eps=0.3)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"likelihood": {"noise_variance": 1.0}},
            "likelihood.noise_variance: no likelihood is chosen",
        ),
        (
            {"label-noise": {"eps": 0.1}},
            "label-noise.eps: no label-noise is chosen; choose one with --label-n",
        ),
        ({"data": {"data": "a.npz"}, "dataset": {"owners": 1}}, "unknown option 'dataset.owners'"),
        ({"data": {"target": "outcome"}}, "--target is for your own data and has no effect on mn"),
        ({"data": {"client": "hospital"}}, "--client is for your own data"),
        ({"data": {"drop": ["age"]}}, "--drop is for your own data"),
        ({"data": {"task": "regression"}}, "--task is for your own data"),
        ({"data": {"data": "a.csv", "task": "count"}}, "allowed: classification | regression"),
        ({"data": {"data": "a.xlsx"}}, "or your own data: a file .npz, .csv, .tsv or .parquet"),
        ({"rounds": 0}, "--rounds: 0 is not allowed; allowed: at least 1"),
        ({"calibrate": ["conformal"]}, "--calibrate conformal: no samples are held out for cal"),
        ({"calibrator": {"ood": {"share": 0.9}}}, "calibrator.ood: no samples are held out"),
        (CALIBRATED | {"calibrate": ["conformall"]}, r"'conformall' \(did you mean conformal\?\)"),
        (CALIBRATED | {"calibrate": ["ood", "ood"]}, "--calibrate: ood,ood names one of them twi"),
        (
            CALIBRATED | {"calibrate": ["ood"], "calibrator": {"conformal": {"empty": True}}},
            "calibrator.conformal.empty: conformal is not among --calibrate ood",
        ),
        (CALIBRATED | {"calibrator": {"ood": {"shar": 1}}}, r"did you mean calibrator.ood.share"),
        ({"data": {"clinets": 3}}, r"'--clinets' \(did you mean --clients\?\)"),
        ({"inferense": {}}, r"'inferense' \(did you mean inference\?\)"),
    ],
)
def test_what_would_have_no_effect_is_refused(table, said):
    with pytest.raises(OptionError, match=said):
        resolved(table)


def test_the_number_of_clients_waits_for_the_owners_unless_it_is_chosen():
    natural = {"data": {"data": "synthetic", "partition": "natural", "novel_clients": 12}}
    waiting = resolved(natural)
    assert waiting.with_clients(30).data.clients == 30
    with pytest.raises(OptionError, match="--novel-clients: 12 of 12 clients leave none"):
        waiting.with_clients(12)
    with pytest.raises(OptionError, match="--novel-clients: 12 of 10 clients leave none"):
        resolved({"data": natural["data"] | {"clients": 10}})
    with pytest.raises(OptionError, match="--novel-clients: 12 of 10 clients leave none"):
        resolved({"data": natural["data"] | {"partition": "iid"}})


def test_a_cohort_that_was_chosen_is_not_cut_to_the_owners():
    own = {"data": {"data": "a.csv"}}
    recommended = resolve(load_registry(), "superfed-mm", own, {})
    assert (recommended.run.cohort, recommended.with_clients(3).run.cohort) == (5, 0)
    with pytest.raises(OptionError, match="--cohort: 5 is more than the clients that train"):
        resolved(own | {"cohort": 5}).with_clients(3)


def test_a_stored_experiment_resolves_to_itself():
    file = {
        "data": {"data": "synthetic", "partition": "labels:3", "label_noise": "pair:0.2"},
        "dataset": {"owners": 4},
        "likelihood": {"name": "categorical"},
        "log": ["csv"],
    }
    for method in load_registry().methods:
        experiment = resolve(load_registry(), method, file, {})
        again = resolve(load_registry(), method, experiment.as_toml(), {})
        assert again.as_toml() == experiment.as_toml()
        assert list(again.components()) == list(experiment.components())
        assert again.run == experiment.run


def test_calibration_samples_are_used_by_the_default_calibrators_or_by_those_chosen():
    assert resolved().calibrators == ()
    by_default = resolved(CALIBRATED)
    assert by_default.run.calibrate == ("temperature", "conformal", "ood")
    file = CALIBRATED | {"calibrator": {"conformal": {"scope": "client", "empty": True}}}
    chosen = resolved(
        file, {"calibrate": ("conformal",), "calibrator": {"conformal": {"others": 9.0}}}
    )
    assert chosen.calibrators == (Conformal(scope="client", empty=True, others=9.0),)
    for experiment in (by_default, chosen):
        again = resolved(experiment.as_toml())
        assert again.calibrators == experiment.calibrators
        assert {*experiment.calibrators} <= {*experiment.components()}


def test_an_experiment_has_a_field_for_every_kind_that_has_options():
    fields = {field.name for field in attrs.fields(Experiment)}
    assert {kind.replace("-", "_") for kind in CONFIGURABLE} <= fields


@pytest.mark.parametrize("kind", PARTS)
def test_the_chosen_class_is_that_of_the_resolved_part(kind):
    file = {"likelihood": {"name": "categorical"}}
    flags = {"aggregator": {"name": "llp"}} if kind == "aggregator" else {}
    experiment = resolve(load_registry(), "bpfed", file, flags)
    found = chosen_class(load_registry(), "bpfed", kind, file, flags)
    assert found is type(getattr(experiment, kind))


ODD = [5, -1, 1.5, float("nan"), [], [1], ["a"], [[]], {}, {"name": 5}, {"name": []}, True]
ODD += [dt.date(2020, 1, 1), "", "x", "\0", "a" * 300, {"a": {"a": {}}}, [{"name": 1}]]


def leaves(table, before=()):
    for key, value in table.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from leaves(value, (*before, key))


def test_whatever_stands_in_an_experiment_file_is_one_line_or_right():
    registry = load_registry()
    right = resolve(registry, "bpfed", {}, {"data": {"data": "digits"}}).as_toml()
    refused = []
    for path in [*leaves(right), ("calibrator",), ("calibrator", "conformal"), ("dataset", "odd")]:
        for value in ODD:
            file = copy.deepcopy(right)
            table = file
            for key in path[:-1]:
                table = table.setdefault(key, {})
            table[path[-1]] = value
            try:
                resolve(registry, method_of(file, Path("a.toml")), file, {}).as_toml()
            except BflError as error:
                refused.append(str(error))
    assert len(refused) > 500
    assert not [text for text in refused if "\n" in text or len(text) > 2000]


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = " + "[" * 5000, "= 3", "\x00"])
def test_a_file_that_cannot_be_parsed_is_one_line(tmp_path, text):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(OptionError, match=r"a.toml is not valid TOML") as error:
        read(tmp_path / "a.toml")
    assert len(str(error.value)) < 500
