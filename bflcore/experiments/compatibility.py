"""Which parts fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore.errors import IncompatibleError
from bflcore.options.kinds import FITTED

if TYPE_CHECKING:
    from bflcore.aggregation import Aggregator
    from bflcore.hyper import HyperUpdate
    from bflcore.inference.base import LocalInference
    from bflcore.registry.loading import Registry
    from bflcore.weighting import Weighting

__all__ = ["FITTED", "check", "fits", "ignored"]


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
