"""Which parts fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from bflcore.errors import IncompatibleError
from bflcore.options.kinds import FITTED

if TYPE_CHECKING:
    from bflcore.aggregation import Aggregator
    from bflcore.hyper import HyperUpdate
    from bflcore.inference.base import LocalInference
    from bflcore.registry.loading import Registry
    from bflcore.weighting import Weighting

Part: TypeAlias = "type[Aggregator | Weighting | HyperUpdate]"

__all__ = ["FITTED", "check", "fits", "ignored"]


def fits(inference: type[LocalInference], part: Part) -> bool:
    """Return whether `part` works with the posteriors of `inference`, and does what it needs."""
    return _knows(inference, part) and _does(inference, part)


def _knows(inference: type[LocalInference], part: Part) -> bool:
    return not part.families or inference.family in part.families


def _does(inference: type[LocalInference], part: Part) -> bool:
    return part.kind not in inference.needs or inference.needs[part.kind] in part.tags


def check(registry: Registry, inference: type[LocalInference], *parts: Part) -> None:
    """Raise `IncompatibleError` for a part that does not fit the inference."""
    for part in parts:
        if fits(inference, part):
            continue
        fitting = [name for name, other in registry.of(part.kind).items() if fits(inference, other)]
        if _knows(inference, part):
            tag = inference.needs[part.kind]
            reason = (
                f"inference {inference.name} does not work with {part.kind} {part.name}, which "
                f"lacks the tag {tag} ({part.known_tags[tag]})"
            )
        else:
            reason = (
                f"{part.kind} {part.name} needs posteriors of the family "
                f"{' or '.join(part.families)}, but inference {inference.name} gives "
                f"{inference.family}"
            )
        raise IncompatibleError(
            f"{reason}; {part.kind}s that fit: {', '.join(fitting) or 'none'} (bfl matrix shows "
            "all combinations)"
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
