"""Runs that are interrupted, and what they leave, for the tests of runs and of ``bfl resume``."""

from __future__ import annotations

import json

from bflcore.options import options_of
from bflcore.registry.loading import load_registry

ROUNDS = 6


TINY = (
    *("--data", "synthetic", "--partition", "natural", "--clients", "3", "--workers", "1"),
    *("--rounds", str(ROUNDS), "--eval-every", "2"),
    *("-o", "dataset.owners=3", "-o", "dataset.samples=20", "-o", "dataset.features=6"),
    *("-o", "dataset.classes=3", "--model", "mlp", "-o", "model.hidden=5"),
)


QUICK = {"local_epochs": 1, "head_epochs": 1, "steps": 1}


METHODS = [part.name for part in load_registry().methods.values()]


def inference_of(method):
    return type(load_registry().methods[method].inference)


def quick(method):
    """Return the flags that make a method's training short."""
    known = options_of(inference_of(method))
    names = {field.name for field in known} & QUICK.keys()
    return [word for name in names for word in ("-o", f"inference.{name}={QUICK[name]}")]


def checkpoint(folder):
    """Return the newest checkpoint's tensors, server and clients, as bytes by name."""
    from safetensors import safe_open

    store = folder / "checkpoint"
    newest = max(p for p in store.glob("*.safetensors") if p.stem.isdecimal())
    tensors = {}
    with safe_open(newest, "pt") as file:
        header = json.loads(file.metadata()["bflcore"])
        tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for client, number in header["memories"].items():
        with safe_open(store / f"{number:06d}.clients.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.startswith(f"{client}."):
                    tensors[name] = file.get_tensor(name)
    return header["round"], {name: t.numpy().tobytes() for name, t in tensors.items()}


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def summary(folder):
    found = json.loads((folder / "summary.json").read_text())
    del found["seconds"]
    return found


def same(found, expected):
    assert repr(records(found)) == repr(records(expected))  # repr: a NaN equals itself
    assert checkpoint(found) == checkpoint(expected)
    assert repr(summary(found)) == repr(summary(expected))
    for name in ("evaluation.json", "data.json"):
        assert (found / name).read_text() == (expected / name).read_text()
    ours, theirs = (
        {path.name: path.read_bytes() for path in (folder / "models").iterdir()}
        for folder in (found, expected)
    )
    assert ours == theirs


class Killed(BaseException):
    """Ends a run on the spot, as a kill does, but for this process."""


def stopped_at(monkeypatch, where, after):
    """Make the method `where` of `RunDirectory` or `Checkpoints` raise at its call `after`."""
    owner, name = where
    calls, original = [], getattr(owner, name)

    def stop(self, *arguments, **named):
        calls.append(name)
        if len(calls) > after:
            raise Killed
        return original(self, *arguments, **named)

    monkeypatch.setattr(owner, name, stop)
