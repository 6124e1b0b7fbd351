"""What a run reports: the lines of ``metrics.jsonl``, ``evaluation.json`` and ``summary.json``."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from bflcore.errors import ClientError
from bflcore.problem import metrics, ranking

if TYPE_CHECKING:
    from bflcore.experiments.surveys import Survey
    from bflcore.messages import Evaluation
    from bflcore.rounds import Round

__all__ = ["BY_CLIENT", "Record", "Records", "summary_of"]

SAMPLE = "sample."  # prefix of metrics of the clients that were evaluated in earlier rounds

BY_CLIENT = "by_client"  # in a line of metrics.jsonl: what the page draws of each client
FOLLOWED = 200  # clients at most whose metrics are in every line
DIGITS = 5  # of those metrics

Record = dict[str, Any]
Sums = Mapping[str, Any]


class Records:
    """Accumulates what a run reports, and formats it.

    Callers add the times that they measure to `seconds`. `state` is what a checkpoint stores;
    `restore` takes it back, with the lines of ``metrics.jsonl`` written until then.
    """

    def __init__(self, method: str, ids: Sequence[int | str] = ()) -> None:
        self.method = method
        self.ids = ids  # of the owners, by the clients' numbers
        self.records: list[Record] = []  # the lines of metrics.jsonl
        self.evaluation: Record = {}  # evaluation.json, of the latest evaluation
        self.seconds = {"clients": 0.0, "server": 0.0, "evaluation": 0.0}
        self.bytes = {"up": 0, "down": 0}
        self.dropped: list[Record] = []  # since the last line of metrics.jsonl
        self.unstable: list[Record] = []  # what became unstable, and in which round
        self._started = time.perf_counter()

    def state(self) -> Record:
        """Return the counters as plain values, exactly."""
        return {
            "evaluated": len(self.records),
            "seconds": dict(self.seconds),
            "bytes": dict(self.bytes),
            "dropped": list(self.dropped),
            "unstable": list(self.unstable),
            "total": time.perf_counter() - self._started,
        }

    def restore(self, state: Mapping[str, Any], records: Sequence[Record]) -> None:
        """Continue from `state` and the lines written until then."""
        self.records = list(records)
        self.seconds, self.bytes = dict(state["seconds"]), dict(state["bytes"])
        self.dropped, self.unstable = list(state["dropped"]), list(state["unstable"])
        self._started = time.perf_counter() - state["total"]

    def add_answers(self, number: int, found: Survey) -> None:
        """Count what the survey, or the calibration after a round, cost, and who was left out."""
        self.bytes["up"] += found.bytes_up
        self.bytes["down"] += found.bytes_down
        self._drop(number, found.dropped)

    def add_round(self, number: int, done: Round) -> None:
        """Count what a round cost, and the clients that it dropped."""
        self.seconds["clients"] += done.client_seconds
        self.seconds["server"] += done.server_seconds
        self.bytes["up"] += done.bytes_up
        self.bytes["down"] += done.bytes_down
        self._drop(number, done.dropped)

    def add_excesses(self, found: Iterable[Record]) -> list[Record]:
        """Note the quantities that are beyond their bounds; return those that were not before."""
        known = {excess["quantity"] for excess in self.unstable}
        new = [excess for excess in found if excess["quantity"] not in known]
        self.unstable += new
        return new

    def add_evaluation(
        self,
        number: int,
        loss: float,
        server: Mapping[str, Any],
        replies: Sequence[Evaluation | ClientError],
        novel: Collection[int],
        sample: Collection[int] = (),
    ) -> Record:
        """Return the line for ``metrics.jsonl``; `server` holds the server's numbers by name.

        `novel` are the clients held out of training; `sample` are those that were evaluated in
        earlier rounds, if these are all: their metrics are reported, too, for comparison.
        """
        found = [reply for reply in replies if not isinstance(reply, ClientError)]
        self._drop(number, [reply for reply in replies if isinstance(reply, ClientError)])
        groups = {name: _measured(members) for name, members in _group(found, novel).items()}
        record: Record = {"round": number, "train.loss": loss, **server}
        for group, members in groups.items():
            record |= _summarised(group, members)
            if compared := [member for member in members if member[0] in sample]:
                record |= _summarised(f"{SAMPLE}{group}", compared)
        if "personal" in groups:
            record[BY_CLIENT] = _followed(groups["personal"], sample)
        record |= {
            "seconds": _rounded(self.seconds),
            "bytes": dict(self.bytes),
            "dropped": self.dropped,
            "unstable": list(self.unstable),
        }
        self.dropped = []
        self.evaluation = {"round": number}
        self.evaluation |= {group: _detail(members) for group, members in groups.items()}
        for group in groups:
            for entry in self.evaluation[group]["clients"]:
                entry.update(self._named(entry["client"]))
        for name, validation in (("curves", False), ("validation.curves", True)):
            chosen = [e for e in found if e.validation == validation and e.client not in novel]
            if curves := _curves(chosen):
                self.evaluation[name] = curves
        self.records.append(record)
        return record

    def summary(self) -> Record:
        """Return ``summary.json``."""
        seconds = {"total": time.perf_counter() - self._started} | self.seconds
        dropped = [entry for record in self.records for entry in record["dropped"]] + self.dropped
        return summary_of(self.method, self.records, seconds, self.bytes, dropped)

    def _drop(self, number: int, failures: Iterable[ClientError]) -> None:
        self.dropped += [
            {
                "round": number,
                **self._named(f.client),
                "stage": f.stage,
                "reason": f.reason,
            }
            for f in failures
        ]

    def _named(self, client: int) -> Record:
        known = 0 <= client < len(self.ids)  # a reply may claim any number
        return {"client": client} | ({"id": self.ids[client]} if known else {})


def summary_of(
    method: str,
    records: Sequence[Record],
    seconds: Mapping[str, float],
    bytes: Mapping[str, int],
    dropped: Sequence[Record],
) -> Record:
    """Return ``summary.json`` for the evaluated rounds `records`, the last of which is final."""
    validation = any(key.startswith("validation.") for key in records[-1])
    samples, models = ("validation", "validation") if validation else ("test", "personal")
    classifies = f"{models}.accuracy" in records[-1]
    key, sign = (f"{models}.accuracy", 1) if classifies else (f"{models}.rmse", -1)
    compared = [r.get(SAMPLE + key) or r.get(key) or {"mean": -sign * 1e30} for r in records]
    best = records[max(range(len(records)), key=lambda i: sign * compared[i]["mean"])]
    over = " of the clients evaluated in all rounds" if SAMPLE + key in records[-1] else ""
    return {
        "method": method,
        "rounds": records[-1]["round"],
        "final": _metrics_of(records[-1]),
        "best": {
            **_metrics_of(best),
            "chosen": f"the evaluated round with the best {key}, chosen on {samples} data{over}",
        },
        "seconds": _rounded(seconds),
        "bytes": dict(bytes),
        "dropped": list(dropped),
        "unstable": records[-1].get("unstable", []),
    }


def _group(
    found: Sequence[Evaluation], novel: Collection[int]
) -> dict[str, list[tuple[int, Sums]]]:
    """Group evaluations: clients' own models, the server's model, clients held out of training.

    The groups on validation samples are called validation, validation.global, validation.novel;
    those of calibrated models are called calibrated, novel.calibrated and so on. The group ood
    holds the comparison with foreign samples.
    """
    groups: dict[str, list[tuple[int, Sums]]] = {}
    for validation in (False, True):
        own, prefix = ("validation", "validation.") if validation else ("personal", "")
        on = [e for e in found if e.validation == validation]
        trained = [e for e in on if e.client not in novel]
        groups |= {
            own: [(e.client, e.personal) for e in trained],
            f"{prefix}global": [(e.client, e.shared) for e in trained if e.shared is not None],
            f"{prefix}novel": [(e.client, e.personal) for e in on if e.client in novel],
            f"{prefix}calibrated": [(e.client, e.calibrated) for e in trained if e.calibrated],
            f"{prefix}novel.calibrated": [
                (e.client, e.calibrated) for e in on if e.calibrated and e.client in novel
            ],
        }
    groups["ood"] = [(e.client, e.ood) for e in found if e.ood is not None]
    return {name: members for name, members in groups.items() if members}


def _measured(members: Sequence[tuple[int, Sums]]) -> list[tuple[int, Sums, dict[str, float]]]:
    """Add each client's metrics to its sums."""
    return [(client, sums, metrics.metrics_of(sums)) for client, sums in members]


def _summarised(group: str, members: Sequence[tuple[int, Sums, dict[str, float]]]) -> Record:
    """Return every metric of a group: its mean and deviation over clients, and pooled."""
    found = metrics.summarise([sums for _, sums, _ in members], [m for *_, m in members])
    return {f"{group}.{name}": value for name, value in found.items()}


def _followed(
    members: Sequence[tuple[int, Sums, dict[str, float]]], sample: Collection[int]
) -> Record:
    """Return a few metrics of those clients that every evaluation covers, as columns."""
    chosen = [member for member in members if not sample or member[0] in sample][:FOLLOWED]
    names = [name for name in ("accuracy", "rmse", "nll") if any(name in m for *_, m in chosen)]
    columns: Record = {"client": [client for client, *_ in chosen]}
    for name in names:
        columns[name] = [_short(found.get(name)) for *_, found in chosen]
    return columns


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _detail(members: Sequence[tuple[int, Sums, dict[str, float]]]) -> Record:
    """Return every client's metrics, the pooled ones, metrics by class, and curves."""
    total = reduce(metrics.add, (dict(sums) for _, sums, _ in members))
    detail: Record = {
        "clients": [
            {"client": client, "examples": int(sums["examples"]), **found}
            for client, sums, found in members
        ],
        "pooled": metrics.metrics_of(total),
    }
    if "confusion" in total:
        detail |= {
            "classes": metrics.class_metrics(total),
            "confusion": total["confusion"].tolist(),
        }
    if "strangeness" in total:
        own, foreign = total["strangeness"].tolist()
        detail["scores"] = {"borders": ranking.borders(len(own)).tolist()}
        detail["scores"] |= {"own": own, "foreign": foreign}
    if "bin_count" in total:
        detail |= {
            "reliability": metrics.reliability_diagram(total),
            "retention": metrics.retention_curve(total),
        }
    return detail


def _curves(found: Sequence[Evaluation]) -> Record:
    """Return, by axis, the metrics at every value: mean, std, pooled, and each client's."""
    curves: Record = {}
    for axis in found[0].curves if found else ():
        values = list(found[0].curves[axis])
        over = [metrics.summarise([e.curves[axis][value] for e in found]) for value in values]
        curves[axis] = {"values": values}
        for kind in ("mean", "std", "pooled"):
            curves[axis][kind] = _columns([{n: f[kind] for n, f in at.items()} for at in over])
        curves[axis]["clients"] = [
            {"client": e.client}
            | _columns([metrics.metrics_of(e.curves[axis][value]) for value in values])
            for e in found
        ]
    return curves


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items()}


def _metrics_of(record: Record) -> Record:
    apart = {BY_CLIENT, "seconds", "bytes", "dropped", "unstable"}
    return {name: value for name, value in record.items() if name not in apart}
