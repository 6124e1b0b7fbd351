"""Runs that are killed and go on: the same numbers, to the bit, as if nothing had happened."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import bflcore
from bflcore.cli import main
from bflcore.experiments.checkpoint import Checkpoints
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.integrity import read_json, write_json

from ..interrupted import (
    METHODS,
    ROUNDS,
    TINY,
    Killed,
    quick,
    same,
    stopped_at,
    summary,
)

STOPS = {
    "before the first checkpoint": ((Checkpoints, "write"), 0),
    "between a line of metrics and its checkpoint": ((Checkpoints, "write"), 2),
    "before a line of metrics": ((RunDirectory, "append"), 2),
    "between the last checkpoint and the summary": ((Checkpoints, "__exit__"), 0),
}


@pytest.mark.parametrize(
    ("stop", "every"), [*((stop, 1) for stop in STOPS), ("before a line of metrics", 4)]
)
def test_wherever_it_stopped_a_run_goes_on_with_its_counters(
    bfl, tmp_path, monkeypatch, stop, every
):
    words = (
        *("run", "bpfed", *TINY, *quick("bpfed"), "--quiet", "--log", "csv", "--drop-out", "0.2"),
        *("--corrupt", "0.3", "--pretrain", "0.2", "--checkpoint-every", every),
    )
    assert bfl(*words, "--out", "whole")[0] == 0
    with monkeypatch.context() as patch:
        stopped_at(patch, *STOPS[stop])
        with pytest.raises(Killed):
            main([*map(str, words), "--out", "cut"])
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "train.lo')
    assert bfl("resume", "cut", "--quiet") == (0, "", "")
    same(tmp_path / "cut", tmp_path / "whole")
    dropped = summary(tmp_path / "cut")["dropped"]
    assert {d["reason"] == "it dropped out (--drop-out)" for d in dropped} == {True, False}
    ours, theirs = (
        [line.split(",seconds")[0].split(",")[:2] for line in path.read_text().splitlines()]
        for path in (tmp_path / name / "metrics.csv" for name in ("cut", "whole"))
    )
    assert ours == theirs


def kill_and_resume(folder, words, kills, seed):
    """Kill -9 the run at random moments until it has been killed `kills` times; let it finish."""
    draw = random.Random(seed)
    command, landed = [*words, "--out", str(folder)], 0
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-m", "bflcore.cli", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=folder.parent,
        )
        while not (folder / "environment.json").exists() and process.poll() is None:
            time.sleep(0.01)
        if command[0] == "resume":  # starting takes long; kills shall land in the rounds
            before = sorted((folder / "checkpoint").glob("*"))
            while sorted((folder / "checkpoint").glob("*")) == before and process.poll() is None:
                time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.4))
        process.kill()
        landed += process.wait() == -signal.SIGKILL
        process.stderr.close()
        command = ["resume", str(folder)]
    return landed


def kills_change_nothing(bfl, tmp_path, method, kills):
    words = [
        "run",
        method,
        *TINY,
        *quick(method),
        "--rounds",
        "60",
        "--workers",
        "2",
        "--seed",
        "1",
    ]
    assert bfl(*words, "--out", "whole", "--quiet")[0] == 0
    landed = kill_and_resume(tmp_path / "cut", words, kills, seed=kills)
    assert landed, "no kill came before the end"
    bfl("resume", "cut", "--quiet")
    same(tmp_path / "cut", tmp_path / "whole")


def test_kills_at_random_moments_change_nothing(bfl, tmp_path):
    kills_change_nothing(bfl, tmp_path, "bpfed", 3)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_twenty_kills_at_random_moments_change_nothing(bfl, tmp_path, method):
    kills_change_nothing(bfl, tmp_path, method, 20)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run; copy it before you change it."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.raises(SystemExit) as end:
        main(["run", "bpfed", *TINY, *quick("bpfed"), "--quiet", "--out", str(folder / "run")])
    assert end.value.code == 0
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    """A finished run without its summary: what a kill at the end leaves."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    return tmp_path / "run"


def newest(folder):
    return folder / "checkpoint" / f"{ROUNDS:06d}.safetensors"


def refused(bfl, *words):
    status, out, err = bfl("resume", *words)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_a_finished_run_says_so(bfl, finished):
    status, out, _ = bfl("resume", finished)
    assert status == 0
    assert f"is finished ({ROUNDS} rounds)" in out


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[:-50])


def damage_header(path):
    path.write_bytes(path.read_bytes()[:6])


class Trap:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("sprung",)


def damage_pickle(path):
    path.write_bytes(pickle.dumps(Trap()))


def damage_torch(path):
    torch.save({"start.mean": torch.zeros(3), "trap": Trap()}, path)


def damage_foreign(path):
    save_file({"start.mean": torch.zeros(3)}, path)


def damage_format(path):
    save_file({}, path, {"bflcore": json.dumps({"format": 99})})


def damage_fields(path):
    save_file({}, path, {"bflcore": json.dumps({"format": 1, "round": "x", "memories": []})})


DAMAGES = [
    *(damage_truncate, damage_header, damage_pickle, damage_torch, damage_foreign),
    *(damage_format, damage_fields),
]


@pytest.mark.parametrize("part", ["", ".clients"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
def test_a_damaged_checkpoint_is_replaced_from_the_one_before(
    bfl, tmp_path, run, finished, damage, part
):
    path = newest(run).with_name(f"{ROUNDS:06d}{part}.safetensors")
    damage(path)
    status, _, err = bfl("resume", run, "--quiet")
    assert (status, err.count("\n")) == (0, 1)
    assert err.startswith("warning: ")
    assert f"continuing from the checkpoint of round {ROUNDS - 1}" in err
    assert not (tmp_path / "sprung").exists()
    same(run, finished)


def test_a_finished_run_is_repaired_too(bfl, run, finished):
    shutil.copy(finished / "summary.json", run)
    damage_truncate(newest(run))
    assert bfl("resume", run, "--quiet")[0] == 0
    same(run, finished)
    assert "is finished" in bfl("resume", run)[1]


def test_a_folder_in_the_place_of_a_checkpoint_is_one_line(bfl, run):
    newest(run).unlink()
    newest(run).mkdir()
    status, _, err = bfl("resume", run, "--quiet")
    assert status == 2
    last = err.splitlines()[-1]
    assert last.startswith(f"error: {newest(run)} cannot be written (Is a directory)")
    assert last.endswith(f"Continue with: bfl resume {run}")


def test_without_a_sound_checkpoint_the_run_is_refused_in_one_line(bfl, run):
    for path in (run / "checkpoint").iterdir():
        damage_truncate(path)
    message = refused(bfl, run)
    assert "checkpoint" in message
    assert "start the run again" in message


def test_changed_data_is_refused_and_forced(bfl, tmp_path, run):
    environment = run / "environment.json"
    known = read_json(environment)
    known["fingerprints"]["the data or its partition"] = "other"
    known["distributions"]["bfl-bpfed"] = "0.0.1"
    known["distributions"]["bfl-tdamp"] = "0.0.1"  # not used: no matter
    write_json(environment, known)
    message = refused(bfl, run)
    assert "bfl-bpfed was 0.0.1 and is" in message
    assert "the data or its partition changed" in message
    assert "bfl-tdamp" not in message
    assert "--force" in message
    status, _, err = bfl("resume", run, "--force", "--quiet")
    assert status == 0
    assert "resuming despite changes: bfl-bpfed was 0.0.1" in err
    forced = json.loads(environment.read_text())["forced"]
    assert [entry["round"] for entry in forced] == [ROUNDS]
    (run / "summary.json").unlink()
    assert bfl("resume", run, "--quiet") == (0, "", "")  # what was forced once is known now


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [("rounds = 6", "rounds = 8", False), ("workers = 1", "workers = 2", True)],
)
def test_settings_that_decide_results_must_not_change(bfl, run, old, new, kept):
    file = run / "experiment.toml"
    file.write_text(file.read_text().replace(old, new))
    if kept:
        assert bfl("resume", run, "--quiet") == (0, "", "")
    else:
        assert "experiment.toml changed" in refused(bfl, run)
        assert bfl("resume", run, "--quiet", "--force")[0] == 0
        assert summary(run)["rounds"] == 8


def test_lost_metrics_are_noticed(bfl, run):
    (run / "metrics.jsonl").write_text("")
    assert "0 of 3 evaluated rounds" in refused(bfl, run)


def test_a_run_that_goes_on_is_left_alone(bfl, run):
    with RunDirectory(run).lock():
        assert "another process is running in" in refused(bfl, run)
    assert bfl("resume", run, "--quiet") == (0, "", "")


def test_what_is_no_run_is_refused(bfl, tmp_path, run):
    assert "is not a run directory" in refused(bfl, tmp_path)
    (run / "environment.json").unlink()
    assert "environment.json is missing" in refused(bfl, run)


def test_nothing_that_a_run_keeps_is_a_pickle(finished):
    for path in Path(finished).rglob("*"):
        if path.is_file():
            known = {".toml", ".json", ".jsonl", ".npz", ".html", ".safetensors"}
            assert path.suffix in known or (path.name, path.read_bytes()) == (".lock", b"")


def test_a_run_of_an_earlier_version_is_described_when_it_is_resumed(bfl, tmp_path, monkeypatch):
    words = ("run", "fedavg", *TINY, *quick("fedavg"), "--quiet")
    assert bfl(*words, "--out", "whole")[0] == 0
    with monkeypatch.context() as patch:
        stopped_at(patch, (Checkpoints, "write"), 2)
        with pytest.raises(Killed):
            main([*map(str, words), "--out", "cut"])
    (tmp_path / "cut" / "data.json").unlink()
    assert bfl("resume", "cut", "--quiet") == (0, "", "")
    same(tmp_path / "cut", tmp_path / "whole")


FILES = ("checkpoint/*.safetensors", "metrics.jsonl", "environment.json", "experiment.toml")
FILES += ("evaluation.json", "data.json", "summary.json", "partition.npz", "models/*")


def mutated(content, draw):
    """Return damaged content: flipped bits, a lost end, a lost or repeated or exchanged piece."""
    found, kind = bytearray(content), draw.randrange(6)
    at = draw.randrange(len(found))
    length = draw.randrange(1, 65)
    if kind <= 1:
        found[at] ^= 1 << draw.randrange(8)
    elif kind == 2:
        del found[at:]
    elif kind == 3:
        del found[at : at + length]
    elif kind == 4:
        found[at:at] = found[at : at + length]
    else:
        found[at : at + length] = draw.randbytes(length)
    return bytes(found)


def results_of(folder):
    """Return what a run's results are, as the product itself reads them."""
    loaded = bflcore.load(folder)
    own = loaded.client(0).posterior["mean"]
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in loaded.history]
    final = {k: v for k, v in loaded.summary.items() if k != "seconds"}
    return repr((lines, final, {name: tensor.tolist() for name, tensor in own.items()}))


def fuzz(bfl, tmp_path, finished, count, seed, reports=1):
    """Damage each file of a run `count` times: nothing may change a result without a word.

    A report is written after every `reports`-th time.
    """
    expected, draw, outcomes = results_of(finished), random.Random(seed), []
    paths = sorted(path for pattern in FILES for path in finished.glob(pattern))
    for path in paths:
        for number in range(count):
            folder = tmp_path / f"{len(outcomes)}"
            shutil.copytree(finished, folder)
            (folder / path.relative_to(finished)).write_bytes(mutated(path.read_bytes(), draw))
            if number % 2 and path.name != "summary.json":  # as after a kill at the end
                (folder / "summary.json").unlink()
            for command in ("resume", "compare", *["report"] * (number % reports == 0)):
                status, _, err = bfl(command, folder, *["--quiet"] * (command == "resume"))
                outcomes.append((path.name, command, status))
                assert status in {0, 2}, (path.name, number, err)
                assert "Traceback" not in err, (path.name, number, err)
            try:
                found = results_of(folder)
            except bflcore.BflError:
                found = expected
            assert found == expected, (path.name, number)
            shutil.rmtree(folder)
    return outcomes


def test_no_damaged_file_changes_a_result_without_a_word(bfl, tmp_path, finished):
    outcomes = fuzz(bfl, tmp_path, finished, 3, seed=0)
    assert {status for _, _, status in outcomes} == {0, 2}


@pytest.mark.thorough
def test_no_damaged_file_changes_a_result_in_a_thousand_tries_each(
    bfl, tmp_path, finished, monkeypatch
):
    # Drawing takes most of the time, and draws what was read and checked before it.
    monkeypatch.setattr("bflcore.report.plots.svg", lambda figure: f"<svg><!-- {figure} --></svg>")
    outcomes = fuzz(bfl, tmp_path, finished, 1000, seed=1, reports=4)
    (tmp_path / "outcomes.txt").write_text(f"{len(outcomes)} commands: {Counter(outcomes)}")
