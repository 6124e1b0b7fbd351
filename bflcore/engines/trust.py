"""The trust region: a client's result compared with those of the round's other clients.

One client of ten must not decide. A product of Gaussians weighs by precision, an average by the
number of samples, and both follow a mean however far it lies: a client that claims a tiny variance,
a billion samples or a mean of a million would own the fused posterior. So each result is described
by a few numbers, and one whose number exceeds the median of the cohort's by more than a factor is
refused. The median holds as long as fewer than half of the clients lie.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING

from bflcore.errors import ClientError
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.messages import Broadcast, LocalResult
else:
    torch = lazy("torch")

__all__ = ["FEWEST", "TrustRegion", "magnitudes"]

FEWEST = 3  # clients of which a median says anything about one of them
# These vary more between honest clients than means over coordinates do.
LOOSER = {"largest": 10.0, "statistic": 100.0, "examples": 100.0}

Form = tuple[tuple[str, tuple[int, ...], "torch.dtype"], ...]


class TrustRegion:
    """The results of one round so far, by the numbers that describe them.

    `factor` is how many times the median a number may be; 0 trusts everybody.
    """

    def __init__(self, broadcast: Broadcast, factor: float) -> None:
        self.broadcast = broadcast
        self.factor = factor
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._forms: Counter[Form] = Counter()

    def admit(self, results: Iterable[LocalResult]) -> Iterator[LocalResult | ClientError]:
        """Yield the results of a block of clients, one client each, or why one is refused.

        They are compared with each other and with those of earlier blocks of the round.
        """
        block = list(results)
        self._forms.update(_form(result.statistics) for result in block)
        usual = self._forms.most_common(1)[0][0] if block else ()
        sizes = [magnitudes(result, self.broadcast) for result in block] if self.factor else []
        for found in sizes:
            for name, value in found.items():
                insort(self._seen[name], value)  # sorted, so that a median is cheap
        medians = {n: median(v) for n, v in self._seen.items() if len(v) >= FEWEST}
        for row, result in enumerate(block):
            (client,) = result.clients
            if (form := _form(result.statistics)) != usual:
                reason = f"its statistics are {_shown(form)}, not {_shown(usual)} as most clients'"
            else:
                reason = self._excess(sizes[row], medians) if sizes else ""
            yield ClientError(client, "fit", reason) if reason else result

    def _excess(self, found: Mapping[str, float], medians: Mapping[str, float]) -> str:
        """Return which number is too large; "" if none is."""
        for name, value in found.items():
            usual = medians.get(name, 0.0)
            bound = self.factor * next((f for text, f in LOOSER.items() if text in name), 1.0)
            if usual and not value <= bound * usual:
                return (
                    f"{name} is {value:.3g}, {value / usual:.3g} times the median of the round's "
                    f"clients; {bound:g} times is trusted (--trust)"
                )
        return ""


def magnitudes(result: LocalResult, broadcast: Broadcast) -> dict[str, float]:
    """Return the numbers by which one client's result is compared with others, by name.

    They are: how far each field moved from the start (root mean square and largest coordinate), for
    variances (see `Posterior.variances`) the mean and largest precision and the mean variance of
    the coordinates that are not certain; the root mean square of each statistic; the number of
    samples.
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
        if tensor.is_floating_point() and tensor.numel():
            found[f"its statistic {name}"] = _rms(tensor)
    return found


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _form(statistics: Mapping[str, Tensor]) -> Form:
    return tuple((n, tuple(t.shape), t.dtype) for n, t in sorted(statistics.items()))


def _shown(form: Form) -> str:
    return ", ".join(f"{name!r} {dtype} {list(shape)}" for name, shape, dtype in form) or "absent"
