"""The table of the benchmark: one record per method, shift and seed, kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from bfl_shift.benchmark import Benchmark, Found
from bfl_shift.scoring import Scored, digest
from bfl_shift.settings import ALONE, APART
from bflcore.errors import OptionError, RunError
from bflcore.experiments.integrity import add_digest, read_json
from bflcore.files import write_text
from bflcore.studies.results import run_folder

__all__ = ["FOREIGN", "LABELLED", "PUBLISHED", "Record", "Table", "table_of"]

FORMAT = 2
PUBLISHED = Path(__file__).with_name("published.json")  # the results that the manual shows
LABELLED = (
    *("accuracy", "nll", "brier", "ece", "aurc", "coverage", "set_size", "worse_off"),
    *("entropy", "epistemic", "aleatoric"),
)
FOREIGN = ("auroc", "fpr95", "auroc_epistemic", "set_size", "entropy", "epistemic", "aleatoric")
DIGITS = 6  # significant ones in the file; digests are of the exact values


@attrs.frozen
class Record:
    """The scores of one method under one shift with one seed.

    `mean` is over clients, `pooled` over samples; `digest` identifies all clients' exact scores.
    """

    method: str
    shift: str
    seed: int
    digest: str
    mean: Mapping[str, float]
    pooled: Mapping[str, float]

    @property
    def foreign(self) -> bool:
        """Whether the shift asks clients to tell foreign samples from their own."""
        return "auroc" in self.mean

    def as_json(self) -> dict[str, Any]:
        """Return plain values, the scores in the order of `LABELLED` or `FOREIGN`."""
        names = FOREIGN if self.foreign else LABELLED
        found = {"mean": self.mean, "pooled": self.pooled}
        lists = {key: [scores.get(name) for name in names] for key, scores in found.items()}
        return {**attrs.asdict(self), **lists}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Record:
        """Return the record that `as_json` wrote."""
        names = FOREIGN if len(value["mean"]) == len(FOREIGN) else LABELLED
        scores = {
            key: {n: s for n, s in zip(names, value[key], strict=True) if s is not None}
            for key in ("mean", "pooled")
        }
        return cls(**{**value, **scores})


@attrs.frozen
class Table:
    """Records with what repeats them; `missing` are runs without scores, and the reasons.

    `seconds` are those of ``training`` and of ``scoring``, by run; `notes` are sentences for the
    page.
    """

    command: str
    setting: str
    shifts: tuple[str, ...]
    seeds: tuple[int, ...]
    records: tuple[Record, ...]
    missing: tuple[tuple[str, str, int, str], ...] = ()
    versions: tuple[Mapping[str, Any], ...] = ()
    machine: Mapping[str, Any] = attrs.field(factory=dict)
    seconds: Mapping[str, Mapping[str, float]] = attrs.field(factory=dict, eq=False)
    notes: tuple[str, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that have a record."""
        return tuple(dict.fromkeys(record.method for record in self.records))

    def values(
        self, shift: str, score: str, statistic: str = "mean"
    ) -> dict[str, dict[int, float]]:
        """Return a score under a shift by method and seed, where it is there."""
        found: dict[str, dict[int, float]] = {}
        for record in self.records:
            scores: Mapping[str, float] = getattr(record, statistic)
            if record.shift == shift and score in scores:
                found.setdefault(record.method, {})[record.seed] = scores[score]
        return found

    @property
    def equal(self) -> list[tuple[str, ...]]:
        """Groups of methods whose clients have the same scores to the bit in every record."""
        found: dict[tuple[tuple[str, int, str], ...], list[str]] = {}
        for method in self.methods:
            own = [r for r in self.records if r.method == method]
            key = tuple((r.shift, r.seed, r.digest) for r in own)
            found.setdefault(key, []).append(method)
        return [tuple(group) for group in found.values() if len(group) > 1]

    def is_foreign(self, shift: str) -> bool:
        """Return whether a shift asks clients to tell foreign samples from their own."""
        return any(record.foreign for record in self.records if record.shift == shift)

    def beside(self, other: Table) -> Table:
        """Return this table with the methods of another one that it lacks.

        Raises `OptionError` if the other does not fit.
        """
        other.check_fits(self.setting, self.shifts, self.seeds)
        wanted = [
            record
            for record in other.records
            if record.method not in self.methods
            and record.shift in self.shifts
            and record.seed in self.seeds
        ]
        return attrs.evolve(self, records=(*self.records, *wanted))

    def check_fits(self, setting: str, shifts: Iterable[str], seeds: Iterable[int]) -> None:
        """Raise `OptionError` unless the table is of a setting, and has the shifts and seeds."""
        if self.setting != setting:
            raise OptionError(
                f"--table: it is of the setting {self.setting}, this run of {setting}; "
                f"add --setting {self.setting}"
            )
        lacks = [f"shift {name}" for name in sorted({*shifts} - {*self.shifts})]
        lacks += [f"seed {seed}" for seed in sorted({*seeds} - {*self.seeds})]
        if lacks:
            raise OptionError(
                f"--table: it has no {lacks[0]}; allowed: --shifts {','.join(self.shifts)} and "
                f"--seeds {','.join(map(str, self.seeds))}"
            )

    def write(self, path: Path) -> None:
        """Replace a file by JSON with one record per line. Raises `WriteError`."""
        plain = attrs.asdict(self, recurse=False) | {"format": FORMAT}
        plain["columns"] = {"labelled": LABELLED, "foreign": FOREIGN}
        plain["records"] = [record.as_json() for record in self.records]
        found = add_digest(plain)
        lines = [
            f" {json.dumps(key)}: {json.dumps(value) if key != 'records' else _lines(value)}"
            for key, value in found.items()
        ]
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def read(cls, path: Path) -> Table:
        """Return what `write` wrote. Raises `RunError`."""
        step = "give a bfl-shift.json that bfl shift wrote"
        try:
            found = read_json(path, step)
            if found.pop("format") != FORMAT:
                raise RunError(f"{path} is of another version of the benchmark; {step}")
            del found["columns"]
            records = tuple(map(Record.from_json, found.pop("records")))
            lists: dict[str, Any] = {
                name: tuple(found.pop(name)) for name in ("shifts", "seeds", "versions", "notes")
            }
            missing = tuple(tuple(one) for one in found.pop("missing"))
            return cls(**found, **lists, missing=missing, records=records)
        except FileNotFoundError:
            raise RunError(f"{path} does not exist; {step}") from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"{path} is not a table of the benchmark ({error!r}); {step}") from None


def table_of(asked: Benchmark, found: Found, command: str) -> Table:
    """Return the table of what the benchmark found, in the order of its shifts and methods.

    A shift under which no method could be scored is left out. Raises `RunError` if all are.
    """
    records = [
        _record(method, shift.name, seed, scored[shift.name], alone)
        for shift in asked.shifts
        for method in asked.methods
        for seed in asked.seeds
        if (scored := found.scores.get((shift.training, method, seed))) is not None
        for alone in [found.scores.get((shift.training, ALONE, seed), {}).get(shift.name)]
    ]
    scored_shifts = {record.shift for record in records if record.method not in APART}
    if not scored_shifts:
        reason = found.missing[0][-1] if found.missing else "there is no run"
        raise RunError(f"no run could be scored; the first failed because: {reason}")
    return Table(
        command,
        asked.setting.name,
        tuple(shift.name for shift in asked.shifts if shift.name in scored_shifts),
        asked.seeds,
        tuple(record for record in records if record.shift in scored_shifts),
        found.missing,
        found.versions,
        found.machine,
        {
            "training": {
                run_folder(t.cell, t.seed): round(t.seconds, 2) for t in found.trials if t.seconds
            },
            "scoring": found.scoring,
        },
    )


def _record(method: str, shift: str, seed: int, scored: Scored, alone: Scored | None) -> Record:
    clients = scored["clients"].values()
    mean = {name: float(np.mean([one[name] for one in clients])) for name in scored["pooled"]}
    if alone is not None and "accuracy" in mean and method != ALONE:
        mean["worse_off"] = _worse_off(scored["clients"], alone["clients"])
    rounded = [{n: _short(v) for n, v in scores.items()} for scores in (mean, scored["pooled"])]
    return Record(method, shift, seed, digest(scored), *rounded)


def _worse_off(clients: Mapping[str, Any], alone: Mapping[str, Any]) -> float:
    """Return the share of clients that are less accurate than alone."""
    worse = [clients[n]["accuracy"] < alone[n]["accuracy"] for n in clients if n in alone]
    return float(np.mean(worse))


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _lines(values: Iterable[Any] | Sequence[Any]) -> str:
    return "[\n  " + ",\n  ".join(json.dumps(one) for one in values) + "\n ]"
