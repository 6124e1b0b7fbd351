"""Which parts fit together, and what to know about combinations that run all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore.errors import IncompatibleError
from bflcore.lazy import lazy
from bflcore.options.kinds import FITTED

if TYPE_CHECKING:
    from bflcore.aggregation import Aggregator
    from bflcore.experiments.prepare import Prepared
    from bflcore.hyper import HyperUpdate
    from bflcore.inference.base import LocalInference
    from bflcore.models import networks
    from bflcore.registry.loading import Registry
    from bflcore.weighting import Weighting
else:
    networks = lazy("bflcore.models.networks")

__all__ = ["FITTED", "caveats", "check", "fits", "ignored"]


def fits(inference: type[LocalInference], part: type[Aggregator | Weighting | HyperUpdate]) -> bool:
    """Return whether `part` works with the posterior family of `inference`."""
    return not part.families or inference.family in part.families


def check(
    registry: Registry,
    inference: type[LocalInference],
    *parts: type[Aggregator | Weighting | HyperUpdate],
) -> None:
    """Raise `IncompatibleError` for a part that does not support the inference's family."""
    for part in parts:
        if fits(inference, part):
            continue
        fitting = [name for name, other in registry.of(part.kind).items() if fits(inference, other)]
        raise IncompatibleError(
            f"{part.kind} {part.name} needs posteriors of the family {' or '.join(part.families)}, "
            f"but inference {inference.name} gives {inference.family}; {part.kind}s that fit: "
            f"{', '.join(fitting) or 'none'} (bfl matrix shows all combinations)"
        )


def ignored(aggregator: Aggregator, explicit_weighting: str | None) -> str:
    """Return a note that the chosen weighting has no effect, or ``""``.

    `explicit_weighting` is its name where the user gave one, None where it is a default.
    """
    if explicit_weighting is None or aggregator.weighs:
        return ""
    return (
        f"note: --weighting {explicit_weighting} does not change the fusion: aggregator "
        f"{aggregator.name} ignores weights ({aggregator.ignores_weights_because}); "
        "bfl list aggregator shows others"
    )


def caveats(prepared: Prepared) -> list[str]:
    """Return a warning, one line, for each thing in an experiment that its user hardly intends.

    They follow from what the parts declare and from a trial of the network on two samples.
    """
    parts, problem, found = prepared.experiment, prepared.problem, list[str]()
    inference, rule = parts.inference, parts.aggregator
    if inference.leaves_certain and "adds-precision" in rule.tags:
        found.append(
            f"inference {inference.name} sends variance 0 for what a client did not infer, but to "
            f"aggregator {rule.name} 0 means certain: one such client overrules all that inferred "
            "the parameter; --aggregator average counts every client"
        )
    together = min(parts.run.cohort or len(problem.clients), parts.engine.clients_per_step(problem))
    if together > 1 and (why := networks.unbatchable(problem.network, problem.train.x[:2])):
        found.append(
            f"the {together} clients of a training step are trained one after another, because the "
            f"network cannot be batched: {why}; use tensor operations such as torch.where"
        )
    return found
