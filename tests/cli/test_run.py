"""The command line as a user meets it: real runs on small data, and every mistake in one line."""

import json
import re
import tomllib

import numpy as np
import pytest

from bflcore.data.partition import Partition
from bflcore.options.kinds import CONFIGURABLE

from .quick import QUICK, records


@pytest.mark.parametrize("method", ["fedavg", "fedvi", "bpfed"])
def test_a_run_leaves_everything_the_design_promises(bfl, tmp_path, method):
    status, out, err = bfl("run", method, *QUICK)
    assert status == 0, err
    folder = tmp_path / "runs" / f"{method}-synthetic-0"
    assert str(folder.relative_to(tmp_path)) in out
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "experiment.toml",
        "environment.json",
        "partition.npz",
        "data.json",
        "models",
        "metrics.jsonl",
        "summary.json",
        "evaluation.json",
        "checkpoint",
        "report.html",
        "samples.json",
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["method"] == method
    assert set(summary["final"]["personal.accuracy"]) == {"mean", "std", "pooled"}
    assert ("global.accuracy" in summary["final"]) == (method != "bpfed")
    assert set(summary["seconds"]) == {"total", "clients", "server", "evaluation"}
    assert summary["bytes"]["up"] > 0
    assert "chosen on test data" in summary["best"]["chosen"]
    assert len(Partition.load(folder / "partition.npz").train) == 3
    assert "round 2/2" in err


def test_the_stored_experiment_repeats_the_run(bfl, tmp_path):
    assert bfl("run", "bpfed", *QUICK, "--out", "first", "-o", "inference.kl_weight=0.3")[0] == 0
    assert bfl("run", "first/experiment.toml", "--out", "again")[0] == 0
    assert records(tmp_path / "again") == records(tmp_path / "first")


def test_flags_override_the_file_and_the_file_the_method(bfl, tmp_path):
    (tmp_path / "mine.toml").write_text(
        'method = "bpfed"\nrounds = 1\nseed = 5\n[data]\ndata = "synthetic"\nclients = 2\n'
        'partition = "natural"\n'
        "[inference]\nkl_weight = 0.5\nlocal_epochs = 1\n[engine]\nworkers = 1\n"
    )
    status, _, err = bfl("run", "mine.toml", "--seed", "6", "--out", "run", "--lr", "0.01")
    assert status == 0, err
    stored = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())
    assert (stored["rounds"], stored["seed"]) == (1, 6)
    inference = stored["inference"]
    assert (inference["kl_weight"], inference["lr"]) == (0.5, 0.01)
    assert inference["personal_prior"] == "previous"  # the method's own default survives
    assert stored["share"] == "body"


def test_swapping_a_part_drops_the_methods_defaults_for_it(bfl, tmp_path):
    status, _, err = bfl("run", "bpfed", *QUICK, "--inference", "variational", "--out", "run")
    assert status == 0, err
    stored = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())
    assert stored["inference"]["personal_prior"] == "initial"


@pytest.mark.parametrize(
    "swap",
    [
        ("bpfed", "--hyper", "fixed"),
        ("bpfed", "--aggregator", "linear-pool", "--weighting", "max-discrepancy"),
        ("fedavg", "--aggregator", "median"),
        ("bpfed", "--hyper", "empirical-bayes"),
        ("bpfed", "-o", "inference.reinforce_steps=1"),
        ("bpfed", "-o", "inference.estimator=flipout"),
        ("fedvi", "--share", "body", "--weighting", "equal"),
        ("fedvi", "--share", "none"),
        ("fedavg", "--hyper", "continual", "-o", "inference.anchor=0.1"),
        ("fedavg", "--share", "head", "--aggregator", "nwa"),
        ("fedavg", "--cohort", "2", "--novel-clients", "1", "--share", "body", "--log", "csv"),
    ],
)
def test_parts_swap(bfl, tmp_path, swap):
    status, out, err = bfl("run", *QUICK, *swap, "--out", "run", "--json", "--rounds", "1")
    if "--cohort" in swap:
        assert (tmp_path / "run" / "metrics.csv").read_text().startswith("round,train.loss,")
    assert status == 0, err
    assert json.loads(out)["rounds"] == 1


def test_the_input_range_is_recorded_and_impossible_ones_are_one_line(bfl, tmp_path):
    images = ("--data", "digits", "--clients", "3", "--rounds", "1", "--local-epochs", "1")
    assert bfl("run", "fedavg", *images, "--input-range", "-1,1", "--out", "run", "--quiet")[0] == 0
    stored = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())
    assert stored["data"]["input_range"] == "-1,1"
    status, _, err = bfl("run", "fedavg", *QUICK, "--input-range=-1,1", "--out", "table")
    assert (status, err.count("\n")) == (2, 1)
    assert "--input-range" in err
    assert not (tmp_path / "table").exists()


def test_a_weighting_without_effect_is_noted(bfl):
    status, _, err = bfl(
        "run",
        "fedvi",
        *QUICK,
        "--rounds",
        "1",
        "--aggregator",
        "conflation",
        "--weighting",
        "equal",
    )
    assert status == 0, err
    assert "--weighting equal does not change the fusion: aggregator conflation" in err


def test_parts_of_different_families_are_refused_with_what_fits(bfl, tmp_path):
    status, _, err = bfl("run", "fedavg", *QUICK, "--hyper", "empirical-bayes")
    assert status == 2
    assert "needs posteriors of the family gaussian, but inference map gives point" in err
    assert "hypers that fit: accumulate, continual, dual-update, fixed" in err
    assert not (tmp_path / "runs").exists()


def test_regression_runs_on_real_data_and_reports_errors_in_target_units(bfl, tmp_path):
    status, _, err = bfl(
        "run",
        "fedvi",
        "--data",
        "boston",
        "--clients",
        "2",
        "--rounds",
        "2",
        "--workers",
        "1",
        "--out",
        "run",
        "--local-epochs",
        "2",
    )
    assert status == 0, err
    final = json.loads((tmp_path / "run" / "summary.json").read_text())["final"]
    assert {"personal.rmse", "personal.nmse", "personal.nll", "personal.coverage90"} <= set(final)
    assert "report.html" in {path.name for path in (tmp_path / "run").iterdir()}


def test_a_users_own_file_runs(bfl, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    np.savez(tmp_path / "own.npz", x=x, y=(x[:, 0] > 0).astype(int), client=np.arange(60) % 3)
    status, _, err = bfl(
        "run",
        "bpfed",
        "--data",
        "own.npz",
        "--partition",
        "natural",
        "--clients",
        "3",
        "--rounds",
        "1",
        "--workers",
        "1",
        "--out",
        "run",
    )
    assert status == 0, err


def test_a_users_own_model_runs(bfl, tmp_path):
    (tmp_path / "cli_networks.py").write_text(
        "from torch import nn\n"
        "def make(input_shape, outputs):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], outputs))\n"
    )
    status, _, err = bfl("run", "fedavg", *QUICK, "--model", "cli_networks:make", "--out", "run")
    assert status == 0, err


def test_a_network_that_cannot_be_batched_is_warned_of_once_and_runs(bfl, tmp_path):
    (tmp_path / "cli_gates.py").write_text(
        "from torch import nn\n"
        "class Gate(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x if x.isfinite().all() else 0 * x\n"
        "def make(input_shape, outputs):\n"
        "    return nn.Sequential(Gate(), nn.Linear(input_shape[0], outputs))\n"
    )
    words = ("run", "fedavg", *QUICK, "--model", "cli_gates:make", "--quiet")
    status, out, err = bfl(*words, "-o", "engine.chunk=3", "--out", "together")
    assert (status, out) == (0, "")
    (line,) = err.splitlines()
    assert line.startswith(
        "warning: the 3 clients of a training step are trained one after another"
    )
    assert "layer 0 (Gate)" in line
    stored = json.loads((tmp_path / "together" / "environment.json").read_text())["warnings"]
    assert [f"warning: {text}" for text in stored] == [line]
    assert bfl(*words, "--out", "alone") == (0, "", "")
    assert records(tmp_path / "alone") == records(tmp_path / "together")


MISTAKES = {
    "method": (("run", "bpfd"), "unknown method 'bpfd' (did you mean bpfed?)"),
    "part": (("run", "fedavg", "--aggregator", "averge"), "(did you mean average?)"),
    "option": (
        ("run", "fedavg", "-o", "inference.local_epoch=3"),
        "'inference.local_epoch' (did you mean inference.local_epochs?)",
    ),
    "option-form": (("run", "fedavg", "-o", "lr=3"), "PART.OPTION=VALUE"),
    "option-part": (("run", "fedavg", "-o", "infrence.lr=3"), "(did you mean inference?)"),
    "command": (("rn",), "unknown command 'rn' (did you mean run?)"),
    "flag": (("run", "fedavg", "--cleints", "3"), "--clients"),
    "dataset-option": (
        ("run", "fedavg", "--data", "synthetic", "-o", "dataset.alphaa=3"),
        "'dataset.alphaa' (did you mean dataset.alpha?)",
    ),
    "own-file-option": (
        ("run", "fedavg", "--data", "short.npz", "-o", "dataset.owners=3"),
        "unknown option 'dataset.owners'; allowed: dataset.standardise; bfl show dataset own",
    ),
    "label-noise": (("run", "fedavg", "--label-noise", "pari:0.1"), "(did you mean pair?)"),
    "label-noise-option": (
        ("run", "fedavg", "--label-noise", "pair", "-o", "label-noise.eps=1"),
        "label-noise.eps: 1.0 is not allowed",
    ),
    "calibrate": (
        ("run", "fedavg", "--calibrate", "conformal"),
        "--calibrate conformal: no samples are held out for calibration; add --calibration-fract",
    ),
    "calibrator-option": (
        ("run", "fedavg", "--calibration-fraction", "0.2", "-o", "calibrator.ood.shar=1"),
        "(did you mean calibrator.ood.share?)",
    ),
    "option-text": (("run", "fedavg", "--lr", "fast"), "inference.lr: 'fast' is not allowed"),
    "option-of-nothing": (
        ("run", "fedavg", "-o", "likelihood.noise_variance=3"),
        "likelihood.noise_variance: no likelihood is chosen; choose one with --likelihood NAME",
    ),
    "clients": (("run", "fedavg", "--clients", "0"), "--clients: 0 is not allowed"),
    "clients-text": (("run", "fedavg", "--clients", "ten"), "--clients: 'ten' is not allowed"),
    "lr": (("run", "fedavg", "--lr", "-1"), "inference.lr: -1.0 is not allowed"),
    "nan": (("run", "fedavg", "--lr", "nan"), "inference.lr: nan is not allowed"),
    "too-many": (
        ("run", "fedavg", "--data", "digits", "--clients", "2000"),
        "--clients: 2000 exceeds the 1797 samples",
    ),
    "novel": (("run", "fedavg", "--clients", "3", "--novel-clients", "3"), "leave none to train"),
    "cohort": (("run", "fedavg", "--clients", "3", "--cohort", "4"), "at most 3"),
    "empty-client": (
        ("run", "fedavg", "--data", "digits", "--partition", "labels:1", "--clients", "1797"),
        "without samples",
    ),
    "partition": (("run", "fedavg", "--partition", "label:5"), "(did you mean labels?)"),
    "partition-value": (("run", "fedavg", "--partition", "labels:x"), "'x' is not allowed"),
    "too-many-classes": (
        ("run", "fedavg", "--data", "digits", "--partition", "labels:11"),
        "at most 10",
    ),
    "data": (("run", "fedavg", "--data", "minst"), "(did you mean mnist?)"),
    "data-dir": (
        ("run", "fedavg", "--data", "mnist", "--data-dir", "nowhere"),
        "--data-dir: nowhere is not a folder",
    ),
    "no-data": (("run", "fedavg", "--data", "mnist", "--data-dir", "."), "--download"),
    "npz": (("run", "fedavg", "--data", "none.npz"), "none.npz does not exist"),
    "npz-nan": (("run", "fedavg", "--data", "nan.npz"), "x has NaN"),
    "npz-lengths": (("run", "fedavg", "--data", "short.npz"), "x has 4 samples, y has 3"),
    "likelihood": (
        ("run", "fedavg", "--data", "digits", "--likelihood", "gaussian"),
        "allowed: categorical",
    ),
    "device": (
        ("run", "fedavg", "--data", "digits", "--device", "cuda:77"),
        "'cuda:77' is not available",
    ),
    "share": (("run", "fedavg", "--share", "bodi"), "--share: 'bodi' is not allowed"),
    "model-shape": (
        ("run", "fedavg", "--data", "synthetic", "--model", "lenet"),
        "choose --model mlp",
    ),
    "logger": (("run", "fedavg", "--log", "cvs"), "(did you mean csv?)"),
    "file": (("run", "none.toml"), "cannot read none.toml"),
    "file-key": (("run", "key.toml"), "(did you mean rounds?)"),
    "file-data-key": (("run", "datakey.toml"), "(did you mean --clients?)"),
    "file-method": (("run", "nomethod.toml"), "the key method is missing"),
    "exists": (("run", "fedavg", "--data", "digits", "--out", "taken"), "--out: taken exists"),
    "unwritable": (
        ("run", "fedavg", "--data", "digits", "--out", "key.toml/run"),
        "cannot be created",
    ),
    "compare": (("compare", "taken"), "taken is not a run directory"),
    "report": (("report", "nothing"), "nothing is not a run directory"),
    "list": (("list", "metods"), "unknown kind 'metods' (did you mean method?)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(bfl, tmp_path, mistake):
    np.savez(tmp_path / "nan.npz", x=np.full((4, 2), np.nan), y=np.array([0, 1, 0, 1]))
    np.savez(tmp_path / "short.npz", x=np.zeros((4, 2)), y=np.array([0, 1, 0]))
    (tmp_path / "key.toml").write_text('method = "fedavg"\nround = 3\n')
    (tmp_path / "datakey.toml").write_text('method = "fedavg"\n[data]\nclientss = 3\n')
    (tmp_path / "nomethod.toml").write_text("rounds = 3\n")
    (tmp_path / "taken").mkdir()
    before = sorted(tmp_path.rglob("*"))
    arguments, message = MISTAKES[mistake]
    status, out, err = bfl(*arguments)
    assert status == 2
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_optimizer_is_another_spelling_of_optimiser(bfl, tmp_path):
    words = ("-o", "inference.optimizer=sgd", "--out", "run", "--rounds", "1")
    assert bfl("run", "fedavg", *QUICK, *words)[0] == 0
    stored = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())
    assert stored["inference"]["optimiser"] == "sgd"
    both = ("-o", "inference.optimizer=sgd", "-o", "inference.optimiser=adam")
    status, _, err = bfl("run", "fedavg", *both)
    assert (status, "which means the same" in err) == (2, True)


def test_a_data_sets_options_are_stored_in_a_table_of_its_name(bfl, tmp_path):
    assert bfl("run", "fedavg", *QUICK, "--rounds", "1", "--out", "run")[0] == 0
    stored = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())
    assert (stored["dataset"]["owners"], stored["dataset"]["samples"]) == (4, 30)
    assert "options" not in stored["data"]


def test_a_methods_cohort_for_more_clients_than_there_are_is_all_of_them(bfl, tmp_path):
    quick = (*QUICK, "-o", "inference.local_epochs=1")
    status, _, err = bfl("run", "superfed-mm", *quick, "--out", "run")
    assert status == 0, err
    assert tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())["cohort"] == 0
    status, _, err = bfl("run", "superfed-mm", *quick, "--cohort", "5")
    assert status == 2
    assert "--cohort: 5 is more than the clients that train; allowed: at most 3" in err


def test_every_list_that_the_help_refers_to_exists(bfl):
    _, text, _ = bfl("run", "--help")
    named = set(re.findall(r"bfl list ([a-z-]+)", " ".join(text.split())))
    assert named >= {"method", *CONFIGURABLE, "logger"}
    for kind in named:
        assert bfl("list", kind)[0] == 0, kind


def test_the_help_shows_the_default_of_every_flag(bfl):
    _, text, _ = bfl("run", "--help")
    flags = re.split(r"\n  (?=-)", text.partition("Options:")[2])[1:]
    without = {flag.split()[0] for flag in flags if "default:" not in " ".join(flag.split())}
    assert without - {"-h,", "--help"} == {"-o", "--quiet", "--json"}
    rounds = "number of rounds of federated training [at least 1 and at most 1e+06; default: 100]"
    assert f"--rounds VALUE {rounds}" in " ".join(text.split())


LONG = "x" * 300
REFUSED = {
    "rounds without end": ("--rounds", "1e30"),
    "too many rounds": ("--rounds", "9" * 12),
    "a seed beyond 64 bits": ("--seed", "9" * 30),
    "too many workers": ("--workers", "10000"),
    "an endless time limit": ("--client-timeout", "inf"),
    "a device without values": ("--device", "meta"),
    "a network that is too large": ("-o", "model.hidden=1000000000"),
    "a long data set": ("--data", LONG),
    "a long file": ("--data", f"{LONG}.npz"),
    "a long folder": ("--data-dir", LONG, "--data", "digits"),
    "a long model": ("--model", f"{LONG}.py:net"),
    "a long run directory": ("--out", LONG),
}


@pytest.mark.parametrize("flags", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_run_is_one_line_and_leaves_nothing(bfl, tmp_path, flags):
    before = {*tmp_path.rglob("*")}
    words = ("--data", "synthetic", "--out", "out", "--rounds", "1")
    status, out, error = bfl("run", "fedavg", *words, *flags)
    assert (status, out, error.count("\n")) == (2, "", 1), error
    assert "defect" not in error
    assert {*tmp_path.rglob("*")} == before


LABELS = {"largest": 2**64 - 1, "one that wraps to -100": 2**64 - 100, "2**63": 2**63}


@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)
def test_labels_beyond_64_bits_are_refused_and_do_not_wrap(bfl, tmp_path, label):
    y = (np.arange(40) % 2).astype(np.uint64)
    y[7] = label
    np.savez(tmp_path / "a.npz", x=np.zeros((40, 3), np.float32), y=y)
    status, _, error = bfl("run", "fedavg", "--data", "a.npz", "--rounds", "1", "--out", "out")
    assert (status, error.count("\n")) == (2, 1)
    assert not (tmp_path / "out").exists()


def test_a_sample_of_evaluated_clients_is_announced(bfl):
    flags = ("--data", "synthetic", "--clients", "5", "--rounds", "1", "--workers", "1")
    _, _, error = bfl("run", "fedavg", *flags, "--eval-clients", "2", "--out", "a")
    assert "evaluated on a sample of 2 of 5 clients until the last" in error
    assert "sample of" not in bfl("run", "fedavg", *flags, "--out", "b")[2]
