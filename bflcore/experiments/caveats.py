"""What to know about an experiment that runs all the same."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import TYPE_CHECKING

from bflcore.data.user import OwnData
from bflcore.lazy import lazy

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore.experiments.prepare import Prepared
    from bflcore.models import networks
else:
    networks = lazy("bflcore.models.networks")

__all__ = ["caveats"]

LARGE = 5.0  # root mean square of a feature or target that is to be scaled


def caveats(prepared: Prepared) -> list[str]:
    """Return a warning, one line, for each thing in an experiment that its user hardly intends.

    They follow from what the parts declare, from a trial of the network on two samples, from the
    samples, and from the installation.
    """
    parts, problem, found = prepared.experiment, prepared.problem, list[str]()
    inference, rule = parts.inference, parts.aggregator
    if inference.leaves_certain and "adds-precision" in rule.tags:
        found.append(
            f"inference {inference.name} sends variance 0 for what a client did not infer, but to "
            f"aggregator {rule.name} 0 means certain: one such client overrules all that inferred "
            "the parameter; --aggregator average counts every client"
        )
    two = problem.train.x[:2].nan_to_num(0.0)
    together = min(parts.run.cohort or len(problem.clients), parts.engine.clients_per_step(problem))
    if together > 1 and (why := networks.unbatchable(problem.network, two)):
        found.append(
            f"the {together} clients of a training step are trained one after another, because the "
            f"network cannot be batched: {why}; use tensor operations such as torch.where"
        )
    return found + _untested(prepared) + _unscaled(prepared) + _stale()


def _stale() -> list[str]:
    """Name an installation from a checkout whose code has another version by now.

    Plugins have no version but that of their metadata, which are then out of date, too.
    """
    version = str(sys.modules["bflcore"].__version__)
    try:
        installed = metadata.version("bflcore")
    except metadata.PackageNotFoundError:  # on the path without being installed
        return []
    if installed == version:
        return []
    said = (
        f"bflcore is installed as version {installed}, but its code is {version}: the versions "
        "recorded for plugins may be wrong, too; run make install (or pip install) again"
    )
    return [said]


def _untested(prepared: Prepared) -> list[str]:
    """Name the clients without test samples, unless that was asked for or none are here."""
    if prepared.experiment.data.test_fraction == 0:
        return []
    clients = prepared.description.clients
    untested = [str(client.id) for client in clients if not client.test]
    if not untested or not any(client.train for client in clients):
        return []
    if len(untested) == len(clients):
        what = "no client has a test sample, so that nothing is evaluated"
        return [f"{what}; choose a smaller --train-per-class, or leave it out"]
    named = ", ".join(untested[:10]) + (", ..." if len(untested) > 10 else "")
    return [f"clients without test samples, which are not evaluated: {named}"]


def _unscaled(prepared: Prepared) -> list[str]:
    """Name the largest feature and target of a user's own data if nothing scales them."""
    problem, schema = prepared.problem, prepared.description.schema
    own = isinstance(prepared.experiment.dataset, OwnData)
    if problem.standardise or not own or not len(problem.train.x):
        return []
    names = schema.features if schema else ()
    columns = [("feature", problem.train.x.flatten(1), names)]
    if problem.likelihood.task == "regression":
        columns.append(("target", problem.train.y, ()))
    found = []
    for what, values, called in columns:
        size, place = _largest(values)
        if size > LARGE:
            name = called[place] if called else place
            found.append(
                f"{what} {name} is about {size:.1g} in size, too large to train on as it is: "
                "-o dataset.standardise=true scales features and targets by sums over the clients"
            )
    return found


def _largest(values: Tensor) -> tuple[float, int]:
    """Return the largest root mean square of the columns of `values` ``[N, F]``, and its place."""
    sizes = values.double().square().mean(0).sqrt()
    return float(sizes.max()), int(sizes.argmax())
