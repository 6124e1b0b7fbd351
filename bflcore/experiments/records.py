"""What a run reports: the lines of ``metrics.jsonl``, ``evaluation.json`` and ``summary.json``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bflcore.engines.screening import screen_evaluations
from bflcore.errors import ClientError

if TYPE_CHECKING:
    from bflcore.engines.base import Session
    from bflcore.messages import Broadcast, Evaluation
    from bflcore.problem.base import Problem
    from bflcore.rounds import Recipe, Round

__all__ = ["Record", "Summary"]

Record = dict[str, Any]


class Summary:
    """Accumulates what a run reports.

    `state` is what a checkpoint keeps of it; `restore` takes that and the lines of
    ``metrics.jsonl`` back.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        self.records: list[Record] = []
        self.evaluation: Record = {}
        self.seconds = {"clients": 0.0, "server": 0.0, "evaluation": 0.0}
        self.bytes = {"up": 0, "down": 0}
        self.dropped: list[Record] = []
        self._fresh: list[Record] = []
        self._began = time.perf_counter()

    def state(self) -> Record:
        """Return the counters as plain values, exactly."""
        return {
            "evaluated": len(self.records),
            "seconds": dict(self.seconds),
            "bytes": dict(self.bytes),
            "dropped": list(self._fresh),  # since the last line of metrics.jsonl
            "total": time.perf_counter() - self._began,
        }

    def restore(self, state: Mapping[str, Any], records: Sequence[Record]) -> None:
        """Go on from `state` and the lines written until then."""
        self.records = list(records)
        self.seconds, self.bytes = dict(state["seconds"]), dict(state["bytes"])
        self._fresh = list(state["dropped"])
        self.dropped = [entry for record in records for entry in record["dropped"]] + self._fresh
        self._began = time.perf_counter() - state["total"]

    def count(self, number: int, done: Round) -> None:
        """Take in what a round cost and whom it dropped."""
        self.seconds["clients"] += done.client_seconds
        self.seconds["server"] += done.server_seconds
        self.bytes["up"] += done.bytes_up
        self.bytes["down"] += done.bytes_down
        self._drop(number, done.dropped)

    def pretrained(
        self, recipe: Recipe, problem: Problem, broadcast: Broadcast, fraction: float
    ) -> tuple[Broadcast, float]:
        """Pre-train, and take in what that cost."""
        from bflcore.experiments.pretraining import pretrain

        clock = time.perf_counter()
        found = pretrain(recipe, problem, broadcast, fraction)
        self.seconds["pretraining"] = time.perf_counter() - clock
        return found

    def evaluated(
        self,
        number: int,
        loss: float,
        report: Mapping[str, float],
        session: Session,
        broadcast: Broadcast,
        problem: Problem,
    ) -> Record:
        """Evaluate every client and return the line for ``metrics.jsonl``."""
        clock = time.perf_counter()
        everyone = (*problem.clients, *problem.novel)
        replies = screen_evaluations(list(session.evaluate(broadcast, everyone)))
        found = [reply for reply in replies if not isinstance(reply, ClientError)]
        self._drop(number, [reply for reply in replies if isinstance(reply, ClientError)])
        groups = _groups(found, problem.novel)
        self.seconds["evaluation"] += time.perf_counter() - clock
        from bflcore.problem import metrics

        record: Record = {"round": number, "train.loss": loss}
        record |= {f"aggregator.{name}": figure for name, figure in report.items()}
        for group, members in groups.items():
            figures = metrics.summarise([sums for _, sums in members])
            for name, figure in figures.items():
                record[f"{group}.{name}"] = figure
        record |= {
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "bytes": dict(self.bytes),
            "dropped": self._fresh,
        }
        self._fresh = []
        self.evaluation = {"round": number} | {
            group: _detail(members) for group, members in groups.items()
        }
        if curves := _curves([e for e in found if e.client not in problem.novel]):
            self.evaluation["curves"] = curves
        self.records.append(record)
        return record

    def finish(self) -> Record:
        """Return ``summary.json``."""
        key = "personal.accuracy" if "personal.accuracy" in self.records[-1] else "personal.rmse"
        sign = 1 if key.endswith("accuracy") else -1
        best = max(self.records, key=lambda r: sign * r.get(key, {"mean": -sign * 1e30})["mean"])
        total = time.perf_counter() - self._began
        return {
            "method": self.method,
            "rounds": self.records[-1]["round"],
            "final": _figures(self.records[-1]),
            "best": {
                **_figures(best),
                "chosen": f"the evaluated round with the best {key}, chosen on test data",
            },
            "seconds": {"total": round(total, 4)}
            | {name: round(value, 4) for name, value in self.seconds.items()},
            "bytes": self.bytes,
            "dropped": self.dropped,
        }

    def _drop(self, number: int, failures: Sequence[ClientError]) -> None:
        entries = [
            {"round": number, "client": f.client, "stage": f.stage, "reason": f.reason}
            for f in failures
        ]
        self.dropped += entries
        self._fresh += entries


def _groups(
    found: Sequence[Evaluation], novel: Sequence[int]
) -> dict[str, list[tuple[int, Mapping[str, Any]]]]:
    """Divide evaluations: clients' own models, the server's model, clients held out of training."""
    trained = [e for e in found if e.client not in novel]
    groups = {
        "personal": [(e.client, e.personal) for e in trained],
        "global": [(e.client, e.shared) for e in trained if e.shared is not None],
        "novel": [(e.client, e.personal) for e in found if e.client in novel],
    }
    return {name: members for name, members in groups.items() if members}


def _detail(members: Sequence[tuple[int, Mapping[str, Any]]]) -> Record:
    from functools import reduce

    from bflcore.problem import metrics

    total = reduce(metrics.add, [dict(sums) for _, sums in members])
    detail: Record = {
        "clients": [
            {"client": client, "examples": int(sums["examples"]), **metrics.figures(dict(sums))}
            for client, sums in members
        ],
        "pooled": metrics.figures(total),
    }
    if "bin_count" in total:
        detail |= {"reliability": metrics.curve(total), "retention": metrics.retention(total)}
    return detail


def _curves(found: Sequence[Evaluation]) -> Record:
    """Return, by axis, the figures at every value: mean, std, pooled, and each client's."""
    from bflcore.problem import metrics

    curves: Record = {}
    for axis in found[0].curves if found else ():
        values = list(found[0].curves[axis])
        sums = {value: [e.curves[axis][value] for e in found] for value in values}
        over = [metrics.summarise(sums[value]) for value in values]
        each = [
            {"client": e.client}
            | _columns([metrics.figures(e.curves[axis][value]) for value in values])
            for e in found
        ]
        curves[axis] = {
            "values": values,
            **{
                kind: _columns([{name: f[kind] for name, f in at.items()} for at in over])
                for kind in ("mean", "std", "pooled")
            },
            "clients": each,
        }
    return curves


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _figures(record: Record) -> Record:
    return {
        key: value for key, value in record.items() if key not in {"seconds", "bytes", "dropped"}
    }
