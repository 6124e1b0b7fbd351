"""Runs that become unstable: variances that collapse or explode, means that grow without bound.

What n samples can explain is bounded. Moving a parameter by one standard deviation of its prior
changes the loss of a sample by about a nat, so that its precision grows by at most a few 1/s0 per
sample, and by R times that if each of R rounds counts the samples anew; and no sample repays more
than a few nats for a parameter that moves k deviations, which costs k^2/2. With a margin of 100,

    s0 / (100 (1 + nR)) < s < s0 100 (1 + nR),    |m| < |m0| + sqrt(s0 100 (1 + nR)),

where m0 and s0 are extremes of the first broadcast, over its start and prior. A posterior beyond
these bounds does not follow from the data, but from a rule that divides or multiplies every round.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.messages import Broadcast
    from bflcore.posteriors import Posterior
    from bflcore.rounds import Recipe

__all__ = ["Stability", "extremes"]

MARGIN = 100.0

SMALLEST, LARGEST, MEAN = "smallest_variance", "largest_variance", "largest_mean"
NAMED = {
    SMALLEST: "the smallest variance",
    LARGEST: "the largest variance",
    MEAN: "the largest |mean|",
}


def extremes(posterior: Posterior) -> dict[str, float]:
    """Return the extremes of a posterior ``[P]`` by name.

    `smallest_variance` and `largest_variance` of the parameters that are not certain, over all
    fields whose name ends in `variance` (none: the family has none); `largest_mean`, the largest
    absolute value of the mean.
    """
    variances = [_known(t) for n, t in posterior.pack().items() if n.endswith("variance")]
    variances = [known for known in variances if known.numel()]
    found = {}
    if variances:
        found[SMALLEST] = min(float(known.min()) for known in variances)
        found[LARGEST] = max(float(known.max()) for known in variances)
    if posterior.mean.numel():
        found[MEAN] = float(posterior.mean.abs().max())
    return found


def _known(variance: Tensor) -> Tensor:
    return variance[variance > 0]


@attrs.frozen(eq=False)
class Stability:
    """What the posteriors of a run are compared with: its first broadcast and its data.

    `examples` is the number of training samples of all clients.
    """

    recipe: Recipe
    first: dict[str, float]
    examples: int

    @classmethod
    def of(cls, recipe: Recipe, first: Broadcast) -> Stability:
        """Return the bounds of a run that begins with the broadcast `first`."""
        start, prior = extremes(first.start), extremes(first.prior)
        widest = {
            name: (min if name == SMALLEST else max)(value, prior.get(name, value))
            for name, value in start.items()
        }
        return cls(recipe, widest, int(first.survey.get("examples", 0)))

    def excesses(self, number: int, found: dict[str, float]) -> list[dict[str, Any]]:
        """Return which extremes after round `number` are beyond what the data can explain.

        Families without a variance have no such bounds. Nor has the smallest variance one where
        an inference leaves parameters certain: a rule may turn their 0 into rounding error.
        """
        if SMALLEST not in self.first:
            return []
        room = MARGIN * (1 + self.examples * number)
        reach = self.first[MEAN] + math.sqrt(self.first[LARGEST] * room)
        bounds = {
            SMALLEST: found.get(SMALLEST, math.inf) < self.first[SMALLEST] / room
            and not self.recipe.inference.leaves_certain,
            LARGEST: found.get(LARGEST, 0.0) > self.first[LARGEST] * room,
            MEAN: found.get(MEAN, 0.0) > reach,
        }
        return [
            {"quantity": name, "round": number, "first": self.first[name], "value": found[name]}
            for name, beyond in bounds.items()
            if beyond
        ]

    def warning(self, excess: dict[str, Any]) -> str:
        """Return the text for an excess in the round in which it began."""
        return (
            f"round {excess['round']}: {self._changed(excess)}, more than {self.examples} samples "
            f"can explain; {self._step()}"
        )

    def reminder(self, excess: dict[str, Any], found: dict[str, float]) -> str:
        """Return the text for the end of a run whose last posterior has the extremes `found`."""
        now = {**excess, "value": found.get(excess["quantity"], excess["value"])}
        return (
            f"unstable from round {excess['round']} on: {self._changed(now)} at the end; do not "
            f"rely on this run: {self._step()}"
        )

    def growth(self, posterior: Posterior) -> str:
        """Say which extreme of a posterior ``[P]`` is farthest from the first ones.

        Empty if none has changed more than `MARGIN` times.
        """
        ratios = {
            name: abs(math.log(value / self.first[name]))
            for name, value in extremes(posterior).items()
            if value > 0 and self.first.get(name, 0.0) > 0
        }
        worst = max(ratios, key=lambda name: ratios[name], default="")
        if not worst or ratios[worst] < math.log(MARGIN):
            return ""
        value = extremes(posterior)[worst]
        return self._changed({"quantity": worst, "first": self.first[worst], "value": value})

    def _changed(self, excess: dict[str, Any]) -> str:
        before, value = excess["first"], excess["value"]
        return (
            f"under aggregator {self.recipe.aggregator.name} and hyper {self.recipe.hyper.name} "
            f"{NAMED[excess['quantity']]} of the server's posterior has "
            f"{'grown' if value > before else 'shrunk'} from {before:.2g} to {value:.2g}"
        )

    def _step(self) -> str:
        return "choose another --aggregator or --hyper (bfl matrix shows which fit)"
