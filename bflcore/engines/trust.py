"""The trust region: a client's result compared with those of the round's other clients.

One client of ten must not decide. A product of Gaussians weighs by precision, an average by the
number of samples, and both follow a mean however far it lies: a client that claims a tiny variance,
a billion samples or a mean of a million would own the fused posterior. So each result is described
by a few numbers, and one whose number exceeds the median of the cohort's by more than a factor is
refused; so is one that pulls the mean back from where the others take it, and one that claims more
samples than it reported before. The median holds as long as fewer than half of the clients lie.

Clients that keep sites (`bflcore.inference.sites`) differ more when they are honest: one that
replies for the first time brings all that its data say, and one that was absent for long answers to
all that changed meanwhile, while the others have settled. Of these, a first reply is compared with
first replies, and no other is refused for moving as far as a first reply usually does.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import attrs

from bflcore.aggregation import COORDINATES, slices
from bflcore.errors import ClientError
from bflcore.lazy import lazy
from bflcore.messages import REPORTED

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.messages import Broadcast, LocalResult
else:
    torch = lazy("torch")

__all__ = ["FEWEST", "Standing", "TrustRegion", "magnitudes"]

FEWEST = 3  # clients of which a median says anything about one of them
# These vary more between honest clients than means over coordinates do.
LOOSER = {"largest": 10.0, "statistic": 100.0, "examples": 100.0}

# Directions. Honest clients with different data move in different directions, but hardly one moves
# against a third of the others while it resembles none. Bounds above what honest clients did in
# runs of all methods (docs/results/one-liar.md).
MOVED = "the change of its mean"
DIRECTED = 8  # clients of which directions can be compared
OPPOSED = 0.3  # cosine, with the opposite sign, that a client without resemblance may have
ALIKE = 1.0  # times the cosine with the most similar client that is allowed on top of that
AGREED = 0.2  # median cosine with the others' sum from which the clients agree
FIRSTS = 101  # first replies that are remembered, for their median
PROBATION = 4  # sound results that are asked for after each refusal
STRIDE = 5.0  # times the median change per median number of samples, where they agree

Form = tuple[tuple[str, tuple[int, ...], "torch.dtype"], ...]


@attrs.frozen
class Standing:
    """What the server remembers of clients between rounds; it is never sent to anybody.

    `reported` is how many samples a client said it has, in the survey or else in its first round;
    `suspected` how many sound results a client must send before it is trusted again. Of clients
    that keep sites, `replied` are those with an accepted reply, and `firsts` holds the numbers that
    described such replies when they were each client's first.
    """

    reported: Mapping[int, int] = attrs.field(factory=dict)
    suspected: Mapping[int, int] = attrs.field(factory=dict)
    replied: frozenset[int] = frozenset()
    firsts: Mapping[str, tuple[float, ...]] = attrs.field(factory=dict)

    def pack(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "reported": {str(client): n for client, n in self.reported.items()},
            "suspected": {str(client): n for client, n in self.suspected.items()},
            "replied": sorted(self.replied),
            "firsts": {name: list(values) for name, values in self.firsts.items()},
        }

    @classmethod
    def unpack(cls, found: Mapping[str, Any]) -> Self:
        """Rebuild it from `pack`; what is missing is empty."""
        reported, suspected = (
            {int(c): n for c, n in found.get(k, {}).items()} for k in ("reported", "suspected")
        )
        return cls(
            reported,
            suspected,
            frozenset(found.get("replied", ())),
            {name: tuple(values) for name, values in found.get("firsts", {}).items()},
        )


class TrustRegion:
    """The results of one round so far, by the numbers that describe them.

    `factor` is how many times the median a number may be; 0 trusts everybody. `before` is what the
    server knew of the clients when the round began. `sites` says that clients keep sites.
    """

    def __init__(
        self,
        broadcast: Broadcast,
        factor: float,
        before: Standing | None = None,
        *,
        sites: bool = False,
    ) -> None:
        before = before or Standing()
        self.broadcast = broadcast
        self.factor = factor
        self.reported = dict(before.reported)
        self.suspected = dict(before.suspected)
        self.sites = sites
        self.replied = set(before.replied)
        self._known = before.replied
        self._accepted = {name: list(values) for name, values in before.firsts.items()}
        self._firsts = {name: sorted(values) for name, values in before.firsts.items()}
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._forms: Counter[Form] = Counter()

    @property
    def standing(self) -> Standing:
        """What the server knows of the clients now."""
        firsts = {name: tuple(values) for name, values in self._accepted.items()}
        return Standing(self.reported, self.suspected, frozenset(self.replied), firsts)

    def admit(self, results: Iterable[LocalResult]) -> Iterator[LocalResult | ClientError]:
        """Yield the results of a block of clients, one client each, or why one is refused.

        They are compared with each other and with those of earlier blocks of the round; their
        directions with each other alone.
        """
        block = list(results)
        self._forms.update(_form(result.statistics) for result in block)
        usual = self._forms.most_common(1)[0][0] if block else ()
        sizes = [magnitudes(result, self.broadcast) for result in block] if self.factor else []
        for result, found in zip(block, sizes, strict=False):
            first = self.sites and result.clients[0] not in self._known
            for name, value in found.items():
                insort(self._seen[name], value)  # sorted, so that a median is cheap
                if first:
                    insort(self._firsts.setdefault(name, []), value)
        medians = {n: median(v) for n, v in self._seen.items() if len(v) >= FEWEST}
        cosines = _cosines(block, self.broadcast) if self.factor else None
        agreed = cosines is not None and _agreement(cosines) >= AGREED
        for row, result in enumerate(block):
            (client,) = result.clients
            if (form := _form(result.statistics)) != usual:
                reason = f"its statistics are {_shown(form)}, not {_shown(usual)} as most clients'"
            elif self.factor:
                reason = self._excess(client, sizes[row], medians, agreed)
                reason = reason or self._grown(client, result)
                reason = reason or ("" if cosines is None else _against(cosines[row], row))
                reason = self._remembered(client, reason)
            else:
                reason = ""
            if not reason:
                self.reported.setdefault(client, int(result.examples[0]))
                if self.sites and sizes:
                    self._accept(client, sizes[row])
            yield ClientError(client, "fit", reason) if reason else result

    def _accept(self, client: int, found: Mapping[str, float]) -> None:
        """Remember an accepted reply, and its numbers if it is the client's first."""
        if client not in self.replied:
            self.replied.add(client)
            for name, value in found.items():
                values = self._accepted.setdefault(name, [])
                if len(values) < FIRSTS:
                    values.append(value)

    def _usual_first(self, name: str) -> float:
        """Return the median of first replies; 0 where there are too few."""
        values = self._firsts.get(name, [])
        return median(values) if len(values) >= FEWEST else 0.0

    def _excess(
        self, client: int, found: Mapping[str, float], medians: Mapping[str, float], agreed: bool
    ) -> str:
        """Return which number is too large; "" if none is."""
        for name, value in found.items():
            usual, first = medians.get(name, 0.0), self._usual_first(name)
            if client not in self._known:
                usual = max(usual, first)
            if not usual or value <= first:
                continue
            bound = self.factor * next((f for text, f in LOOSER.items() if text in name), 1.0)
            if name == MOVED and agreed:
                bound = min(bound, STRIDE * max(1.0, found["examples"] / medians["examples"]))
            if not value <= bound * usual:
                return (
                    f"{name} is {value:.3g}, {value / usual:.3g} times the median of the round's "
                    f"clients; {bound:.3g} times is trusted (--trust)"
                )
        return ""

    def _remembered(self, client: int, reason: str) -> str:
        """Return `reason`, or that the client was refused too recently; "" if it is trusted."""
        suspicion = self.suspected.pop(client, 0)
        left = suspicion + PROBATION if reason else suspicion - 1
        if left > 0:
            self.suspected[client] = left
        if reason or not suspicion:
            return reason
        return f"it was refused before; {suspicion} more sound results are needed (--trust)"

    def _grown(self, client: int, result: LocalResult) -> str:
        """Return that the client has more samples than it reported; "" if it has not."""
        examples = int(result.examples[0])
        before = self.reported.get(client, examples)
        if examples <= before:
            return ""
        return f"examples is {examples}, but it reported {before} before; allowed: at most that"


def _cosines(block: Sequence[LocalResult], broadcast: Broadcast) -> Tensor | None:
    """Return the cosines between the changes of the clients' means ``[K, K]``, in float64.

    None if there are too few clients, or if the family has no field `mean`. The diagonal is 0; so
    are the cosines of a client that did not move.
    """
    if len(block) < DIRECTED or "mean" not in broadcast.start.pack():
        return None
    start = broadcast.start.mean.flatten()
    gram = start.new_zeros(len(block), len(block), dtype=torch.float64)
    for chunk in slices(len(start), COORDINATES):
        sent = torch.stack([result.posterior.mean[0].flatten()[chunk] for result in block])
        moved = (sent - start[chunk]).double()
        gram += moved @ moved.T
    length = gram.diagonal().sqrt()
    cosines = (gram / (length[:, None] * length)).nan_to_num(0.0)
    return cosines.fill_diagonal_(0.0)


def _agreement(cosines: Tensor) -> float:
    """Return the median cosine between a client's direction and the sum of the others'.

    `cosines` ``[K, K]`` are those between clients. Everybody counts with length 1.
    """
    along = cosines.sum(1)
    others = (len(cosines) - 1 + cosines.sum() - 2 * along).clamp_min(0).sqrt()
    return float((along / others).nan_to_num(0.0).median())


def _against(cosines: Tensor, row: int) -> str:
    """Return that a client moves against a third of the others and resembles none; else "".

    `cosines` ``[K]`` are those with the other clients; the client's own is at `row`.
    """
    ordered = torch.cat([cosines[:row], cosines[row + 1 :]]).sort().values
    opposed = float(ordered[len(cosines) // 3 - 1])
    bound = -OPPOSED - ALIKE * max(0.0, float(ordered[-1]))
    if opposed >= bound:
        return ""
    return (
        f"{MOVED} points against a third of the round's clients (cosine {opposed:.2f}; "
        f"{bound:.2f} is trusted, since none is more like it; --trust)"
    )


def magnitudes(result: LocalResult, broadcast: Broadcast) -> dict[str, float]:
    """Return the numbers by which one client's result is compared with others, by name.

    They are: how far each field moved from the start (root mean square and largest coordinate), for
    variances (see `Posterior.variances`) the mean and largest precision and the mean variance of
    the coordinates that are not certain; the root mean square of each statistic that is learnt
    from, not of those that are only reported to the user; the number of samples.
    """
    start, found = broadcast.start.pack(), {"examples": float(result.examples[0])}
    posterior = result.posterior[0]
    variances = posterior.variances()
    for name, tensor in variances.items():
        known = tensor[tensor > 0]
        if len(known):
            precision = known.reciprocal()
            found[f"the mean precision of its {name}"] = float(precision.mean())
            found[f"the largest precision of its {name}"] = float(precision.max())
            found[f"the mean of its {name}"] = float(known.mean())
    others = {*posterior.structure, *posterior.matrices, *variances}
    for name, tensor in posterior.pack().items():
        if name not in others and tensor.is_floating_point() and tensor.numel():
            moved = (tensor - start[name]).abs()
            found[f"the change of its {name}"] = _rms(moved)
            found[f"the largest change of its {name}"] = float(moved.max())
    for name, tensor in result.statistics.items():
        learnt = not name.startswith(REPORTED)
        if learnt and tensor.is_floating_point() and tensor.numel():
            found[f"its statistic {name}"] = _rms(tensor)
    return found


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _form(statistics: Mapping[str, Tensor]) -> Form:
    return tuple((n, tuple(t.shape), t.dtype) for n, t in sorted(statistics.items()))


def _shown(form: Form) -> str:
    return ", ".join(f"{name!r} {dtype} {list(shape)}" for name, shape, dtype in form) or "absent"
