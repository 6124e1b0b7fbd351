"""Worker processes of a study, seen from their parent: each takes the next run as it gets free."""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs

from bflcore.errors import OptionError

if TYPE_CHECKING:
    from bflcore.studies.worker import Task

__all__ = ["Event", "run_tasks"]

LOG = logging.getLogger("bflcore")
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@attrs.frozen
class Event:
    """A task, by its number, has begun or ended; `reason` says why it failed."""

    task: int
    ended: bool = False
    reason: str = ""


def run_tasks(tasks: Sequence[Task], jobs: int) -> Generator[Event]:
    """Run tasks in `jobs` processes; yield an event when one begins and when it ends.

    When the iterator is closed, processes that are still running are killed. Raises `OptionError`
    if a task cannot be sent to a process.
    """
    written = [_pickled(task) for task in tasks]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(tasks)):
        waiting.put(number)
    events: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
    workers = [Worker() for _ in range(min(jobs, len(tasks)))]
    threads = [
        threading.Thread(target=_serve, args=(worker, waiting, written, events), daemon=True)
        for worker in workers
    ]
    for thread in threads:
        thread.start()
    try:
        left = len(tasks)
        while left:
            event = events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            left -= event.ended
    finally:
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join()


class Worker:
    """A process that runs tasks; it is started when there is one, and again after it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, written: bytes) -> str:
        """Run a pickled task; return the reason for which it failed, or an empty text."""
        with self._lock:
            if self._stopped:
                return "stopped"
            process = self._process = self._process or _start()
        assert process.stdin is not None  # noqa: S101 - for mypy: both are pipes
        assert process.stdout is not None  # noqa: S101
        with suppress(OSError):  # it died, as the answer will show
            process.stdin.write(written)
            process.stdin.flush()
        line = process.stdout.readline()
        if line.endswith(b"\n"):
            return str(json.loads(line))
        with self._lock:
            _end(process)
            self._process = None
        return _how_it_died(process.returncode)

    def stop(self) -> None:
        """Kill the process: what a run has written until now is complete."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()
                _end(self._process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that has been killed or has died, and close the pipes to it."""
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):  # what could not be written any more
                stream.close()


def _serve(
    worker: Worker,
    waiting: queue.SimpleQueue[int],
    written: Sequence[bytes],
    events: queue.SimpleQueue[Event | Exception],
) -> None:
    """Give a worker one task after the other, in a thread of its own."""
    try:
        while True:
            number = waiting.get_nowait()
            events.put(Event(number))
            events.put(Event(number, ended=True, reason=worker.run(written[number])))
    except queue.Empty:
        return
    except Exception as error:  # noqa: BLE001 - for the thread that waits for events
        events.put(error)


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109 - a text
    environment = os.environ | {"PYTHONPATH": path} | dict.fromkeys(ONE_THREAD, "1")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "bflcore.studies.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if LOG.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the parent, which kills its workers
    )


def _pickled(task: Task) -> bytes:
    try:
        return pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - whatever the user's data raise
        raise OptionError(
            f"{task.path}: its settings or data cannot be sent to another process "
            f"({type(error).__name__}: {error}); write the data to a file, and give its path"
        ) from None


def _how_it_died(status: int) -> str:
    if status < 0:
        return (
            f"its process was killed (signal {-status}), perhaps for want of memory; run the same "
            "again, with fewer jobs at a time"
        )
    return f"its process died (exit code {status}); bfl run on the same settings may say why"
