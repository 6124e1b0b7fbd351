"""Worker processes: one that dies takes its run along and nothing else."""

import os
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from bflcore import OptionError
from bflcore.studies.workers import Event, run_tasks

TASKS = r"""
import os
import signal
import time
import warnings
from pathlib import Path

import attrs

from bflcore.errors import RunError


@attrs.frozen
class Act:
    path: str
    what: str

    def execute(self):
        if self.what == "exit":
            os._exit(7)
        if self.what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "print":
            print("not a reply")
            os.write(1, b"nor is this\n")
            warnings.warn("neither is this")
        if self.what == "refused":
            raise RunError("two\nlines")
        if self.what == "defect":
            raise KeyError("nothing")
        if self.what == "memory":
            raise MemoryError
        if self.what == "sleep":
            Path(self.path).write_text(str(os.getpid()))
            time.sleep(600)
        Path(self.path).write_text(os.environ["OMP_NUM_THREADS"])
"""


@pytest.fixture
def act(tmp_path, monkeypatch):
    (tmp_path / "acts_of_workers.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acts_of_workers", raising=False)
    import acts_of_workers

    numbers = iter(range(100))
    return lambda what: acts_of_workers.Act(str(tmp_path / f"done-{next(numbers)}"), what)


def test_a_process_that_dies_is_its_tasks_failure_and_another_takes_the_next(act):
    tasks = [act(what) for what in ("exit", "print", "killed", "print")]
    events = list(run_tasks(tasks, 1))
    assert [(event.task, event.ended) for event in events] == [
        (task, ended) for task in range(4) for ended in (False, True)
    ]
    reasons = [event.reason for event in events if event.ended]
    assert "its process died (exit code 7)" in reasons[0]
    assert "its process was killed (signal 9), perhaps for want of memory" in reasons[2]
    assert (reasons[1], reasons[3]) == ("", "")
    assert Path(tasks[1].path).read_text() == "1"  # thread


def test_what_a_task_raises_is_its_failure_in_one_line(act):
    events = run_tasks([act(what) for what in ("refused", "defect", "memory", "print")], 1)
    reasons = [event.reason for event in events if event.ended]
    assert reasons[0] == "two lines"
    assert reasons[1].startswith("unexpected KeyError: 'nothing' at ")
    assert reasons[2] == "there is not enough memory; use less data or a smaller model"
    assert reasons[3] == ""


def test_tasks_are_shared_by_as_many_processes_as_there_are_jobs(act):
    with closing(run_tasks([act("sleep") for _ in range(3)], 2)) as events:
        begun = {next(events), next(events)}
        assert begun == {Event(0), Event(1)}


def test_processes_end_with_their_iterator(act):
    task = act("sleep")
    events = run_tasks([task], 5)
    assert next(events) == Event(0)
    end = time.monotonic() + 120
    started = Path(task.path)
    while not (started.exists() and started.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    began = time.monotonic()
    events.close()
    assert time.monotonic() - began < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_without_tasks_there_is_nothing_to_wait_for():
    assert list(run_tasks([], 4)) == []


def test_a_task_that_cannot_be_sent_is_refused():
    class Local:
        path = "runs/a"

    with pytest.raises(OptionError, match="runs/a: its settings or data cannot be sent to another"):
        list(run_tasks([Local()], 1))
