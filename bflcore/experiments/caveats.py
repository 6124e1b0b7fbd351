"""What to know about an experiment that runs all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bflcore.lazy import lazy

if TYPE_CHECKING:
    from bflcore.experiments.prepare import Prepared
    from bflcore.models import networks
else:
    networks = lazy("bflcore.models.networks")

__all__ = ["caveats"]


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
    known = prepared.description.clients
    if any(one.train for one in known) and not any(one.test for one in known):
        found.append(
            "no client has a test sample, so that nothing can be evaluated; leave samples for "
            "testing (--test-fraction, --test-per-class, fewer --train-per-class)"
        )
    together = min(parts.run.cohort or len(problem.clients), parts.engine.clients_per_step(problem))
    if together > 1 and (why := networks.unbatchable(problem.network, problem.train.x[:2])):
        found.append(
            f"the {together} clients of a training step are trained one after another, because the "
            f"network cannot be batched: {why}; use tensor operations such as torch.where"
        )
    return found
