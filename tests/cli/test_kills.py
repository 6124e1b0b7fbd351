"""Every method, killed: nothing is lost, nothing is left behind, the numbers are the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from bflcore.cli import main

from ..interrupted import METHODS, TINY, quick, same, summary

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads Linux's /proc")
LENGTH = ("--rounds", "25", "--eval-every", "5", "--seed", "1", "-o", "engine.memory_limit=0")
PATIENCE = 600.0  # seconds: a machine may be busy


def words(method, workers, *more):
    flags = ("--quiet", "--workers", str(workers), *more)
    return [str(word) for word in ("run", method, *TINY, *quick(method), *LENGTH, *flags)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run of a method, in one process."""
    made = {}

    def run(method):
        if method not in made:
            made[method] = tmp_path_factory.mktemp("whole") / method
            with pytest.raises(SystemExit) as end:
                main([*words(method, 1), "--out", str(made[method])])
            assert end.value.code == 0
        return made[method]

    return run


# Starting takes most of a run's time: this program imports all and forks for each run, one at a
# time, before torch has computed anything. The workers are forked, too, or spawned as usual.
RUNNER = """
import json, multiprocessing, os, sys, tempfile
import torch, bflcore.engines.pool, bflcore.experiments.run, bflcore.report
from bflcore.cli import main
from bflcore.registry.loading import load_registry
load_registry()
print("ready", flush=True)
for line in sys.stdin:
    given = json.loads(line)
    pid = os.fork()
    if not pid:
        os.environ["TMPDIR"], tempfile.tempdir = given["temporary"], None
        os.dup2(os.open(given["error"], os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if given["fork"]:
            bflcore.engines.pool.multiprocessing = multiprocessing
            multiprocessing.get_context = lambda _, get=multiprocessing.get_context: get("fork")
        try:
            main(given["command"])
        except SystemExit as end:
            os._exit(end.code or 0)
        os._exit(99)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def runner():
    with subprocess.Popen(
        [sys.executable, "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout.readline() == "ready\n"
        yield program
        program.stdin.close()


class Running:
    """A run in a process of its own, with a temporary folder of its own."""

    def __init__(self, runner, tmp_path, command, *, fork=True):
        self.run, self.temporary = tmp_path / "cut", tmp_path / "temporary"
        self.temporary.mkdir()
        self.error, self.runner, self.status = tmp_path / "error.txt", runner, None
        given = {"command": [*command, "--out", str(self.run)], "temporary": str(self.temporary)}
        given |= {"error": str(self.error), "fork": fork}
        runner.stdin.write(json.dumps(given) + "\n")
        runner.stdin.flush()
        self.pid = int(runner.stdout.readline())

    def wait_for_rounds(self, rounds):
        """Wait until some rounds are saved."""
        folder, end = self.run / "checkpoint", time.monotonic() + PATIENCE
        while command_of(self.pid) and time.monotonic() < end:
            saved = [int(p.stem) for p in folder.glob("*.safetensors") if p.stem.isdecimal()]
            if max(saved, default=-1) >= rounds:
                return
            time.sleep(0.002)

    def workers(self):
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        children = path.read_text().split() if path.exists() else []
        return [int(c) for c in children if b"resource_tracker" not in command_of(c)]

    def finish(self):
        """Return exit status and standard error; nothing but the run may be left of it."""
        workers = self.workers()
        status = int(self.runner.stdout.readline())
        end = time.monotonic() + 30
        while any(map(command_of, workers)):
            assert time.monotonic() < end, "a worker outlived its run"
            time.sleep(0.02)
        error = self.error.read_text()
        assert "Traceback" not in error, error
        assert not list(self.temporary.iterdir())
        assert not list(Path("/dev/shm").glob(f"*_{self.pid}_*"))
        return status, error


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def resumed(run, whole):
    """Resume in this process, with one worker: that may change."""
    file = run / "experiment.toml"
    file.write_text(file.read_text().replace("workers = 2", "workers = 1"))
    with pytest.raises(SystemExit) as end:
        main(["resume", str(run), "--quiet"])
    assert end.value.code == 0
    same(run, whole)
    assert not (run / "memories").exists()


def killed(runner, tmp_path, whole, method, workers, number, *, fork=True):
    """Send a signal to a run at a random moment, and finish it; return whether it landed."""
    draw = random.Random(f"{method} {workers} {number}")
    running = Running(runner, tmp_path, words(method, workers), fork=fork)
    running.wait_for_rounds(draw.randrange(20))
    time.sleep(draw.uniform(0, 0.05))
    with suppress(ProcessLookupError):
        os.kill(running.pid, number)
    status, error = running.finish()
    landed = status != 0
    if landed and number == signal.SIGTERM:
        assert status == 128 + number
        assert error.startswith("interrupted: ")
        assert error.endswith(f"Continue with: bfl resume {running.run}\n")
    if landed and running.run.exists():
        resumed(running.run, whole(method))
    elif not landed:
        same(running.run, whole(method))
    return landed


def tally(request, kind, landed):
    """Count kills for the summary at the end."""
    counts = request.config.stash.setdefault(COUNTS, {})
    hit, tried = counts.get(kind, (0, 0))
    counts[kind] = (hit + landed, tried + 1)
    Path(request.config.rootpath / ".pytest_cache" / "kills.txt").write_text(f"{counts}\n")


COUNTS = pytest.StashKey()


def test_a_killed_run_leaves_nothing_but_its_folder_and_goes_on(runner, tmp_path, whole):
    killed(runner, tmp_path, whole, "bpfed", 2, signal.SIGKILL, fork=False)


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_on_after_a_kill(runner, tmp_path, whole, method, workers, request):
    landed = killed(runner, tmp_path, whole, method, workers, signal.SIGKILL)
    tally(request, f"SIGKILL, {workers} workers", landed)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_on_after_a_request_to_end(runner, tmp_path, whole, method, request):
    landed = killed(runner, tmp_path, whole, method, 2, signal.SIGTERM)
    tally(request, "SIGTERM", landed)


def disturbed(runner, tmp_path, method, number, *more):
    """Send a signal to one worker or to all; return the run, its status and how many were hit."""
    draw = random.Random(f"{method} {number}")
    running = Running(runner, tmp_path, words(method, 2, *more))
    running.wait_for_rounds(draw.randrange(15))
    time.sleep(draw.uniform(0, 0.05))
    workers = running.workers()
    hit = draw.sample(workers, min(draw.randint(1, 2), len(workers)))
    for worker in hit:
        os.kill(worker, number)
    status, error = running.finish()
    assert (status, error) == (0, "")
    return running.run, len(hit)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_killed_workers_change_nothing(runner, tmp_path, whole, method, request):
    run, hit = disturbed(runner, tmp_path, method, signal.SIGKILL)
    same(run, whole(method))
    tally(request, "workers killed", hit)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedavg", "bpfed", "fedvi", "em-tdamp", "superfed-mm"])
def test_a_frozen_worker_costs_its_client_that_round(runner, tmp_path, method, request):
    run, hit = disturbed(
        runner,
        tmp_path,
        method,
        signal.SIGSTOP,
        "-o",
        "engine.client_timeout=5",
        "--min-clients",
        "0",
    )
    reasons = {entry["reason"] for entry in summary(run)["dropped"]}
    assert reasons <= {"it took longer than 5 s (--client-timeout)"}
    assert len(summary(run)["dropped"]) == len(reasons) * hit
    tally(request, "SIGSTOP", hit)
