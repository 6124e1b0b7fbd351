"""A worker process of a study: runs what its parent sends, one run after the other.

``python -m bflcore.studies.worker`` reads pickled `Task`s from its standard input and answers each
with a line of JSON: the reason for which the run failed, empty if it is finished. A program of its
own, unlike a process of `multiprocessing`, never imports the user's script again.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import shutil
import threading
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import attrs

from bflcore.errors import BflError, described

__all__ = ["Task", "answer", "main"]


@attrs.frozen
class Task:
    """A run: its folder, and the arguments of `bflcore.run`."""

    path: Path
    method: str
    flags: Mapping[str, Any]
    options: Mapping[str, object]

    def execute(self) -> None:
        """Start the run, or continue it where it stopped."""
        from bflcore.api import runs

        if (self.path / "environment.json").is_file():
            data, beside = self.flags.get("data"), dict[str, Any]()
            if data is not None and not isinstance(data, str | Path):  # a run does not keep it
                beside = {name: self.flags.get(name) for name in ("data", "target", "client")}
            runs.resume(self.path, **beside)
            return
        if self.path.is_dir():  # it was interrupted during set-up
            shutil.rmtree(self.path)
        runs.run(self.method, out=self.path, options=self.options, **self.flags)


def answer(task: Task) -> str:
    """Execute a task; return the reason for which it failed, in one line, or an empty text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a run keeps what it warns of
            task.execute()
    except BflError as error:
        return " ".join(str(error).split())
    except MemoryError:
        return "there is not enough memory; use less data or a smaller model"
    except Exception as error:  # noqa: BLE001 - of a plugin: the run failed, the others go on
        traceback.print_exc()
        return f"unexpected {described(error, None)}"
    return ""


def main() -> NoReturn:
    """Serve until standard input ends: with the parent, whatever ended it."""
    requests, replies = _private(0), _private(1)
    os.dup2(2, 1)  # what a run prints is no reply
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, tasks), daemon=True).start()
    while True:
        replies.write(json.dumps(answer(tasks.get())).encode() + b"\n")
        replies.flush()


def _private(descriptor: int) -> BinaryIO:
    """Return a copy of a standard stream that nothing else in this process uses."""
    copy: BinaryIO = os.fdopen(os.dup(descriptor), "rb" if descriptor == 0 else "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor)
    os.close(nothing)
    return copy


def _read(requests: BinaryIO, tasks: queue.SimpleQueue[Task]) -> None:
    try:
        while True:
            tasks.put(pickle.load(requests))  # noqa: S301 - from the parent
    except EOFError:
        os._exit(0)
    except BaseException:  # noqa: BLE001 - data that cannot be read here, half a task
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
