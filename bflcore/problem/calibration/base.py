"""What a calibrator is: sums over calibration samples, and what they change in predictions.

After the last round, every client that trains sends sums over its calibration samples
(``--calibration-fraction``), which it did not train on. The server adds them up and sends the total
back; nothing else leaves a client. A client predicts with its own sums, with the total, or with
something in between (`Calibrator.scope`).
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs

from bflcore.lazy import lazy
from bflcore.options import Component, component, option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.problem.likelihoods import Predictive
else:
    torch = lazy("torch")

__all__ = [
    "Calibrator",
    "Fitted",
    "adjust",
    "answer",
    "fit",
    "measure",
    "moments",
    "probabilities",
]

LEVELS = (80, 90, 95)  # coverages, in per cent, at which regions are measured
SCOPES = ("federated", "client", "shrunk")
SCOPE = "whose calibration samples a client uses"
ANSWERED = "answered"  # in the total: the clients whose sums are in it
EXAMPLES = "examples"  # among every calibrator's sums: the number of calibration samples

Sums = Mapping[str, "Tensor"]


@component
class Calibrator(Component, abc.ABC):
    """Base of calibrators; ``--calibrate NAME,NAME`` selects them.

    Every calibrator sees the predictions that the model makes by itself, never those that another
    one has adjusted: thresholds of prediction sets must not depend on a temperature that was fitted
    to the same samples.

    What the scopes promise, for a quantity that is exact if samples are exchangeable:

    * ``client``: it holds at each client.
    * ``federated``: it holds for a sample drawn at random from all clients' samples, in proportion
      to their calibration samples (Lu et al. 2023). A client that is unlike the others
      may fare worse, or better.
    * ``shrunk``: the client's samples count fully, those of all others together like `others`
      samples. It holds at each client up to the weighted total variation distance between its
      samples and the others' (Barber et al. 2023).

    Clients held out of training, and those that adapt later, use the federated sums.
    """

    kind: ClassVar[str] = "calibrator"
    tasks: ClassVar[tuple[str, ...]] = ("classification", "regression")

    scope: str = option("federated", SCOPE, choices=SCOPES)
    others: float = option(
        50.0, "samples that those of all other clients count for (with the scope shrunk)", above=0
    )

    @abc.abstractmethod
    def sums(self, predictive: Predictive, y: Tensor) -> dict[str, Tensor]:
        """Return what one client's samples say about its predictions, as sums over samples.

        `predictive` holds the predictions ``[1, S, B, C]`` of samples with targets `y` ``[B]`` or
        ``[B, T]``, B > 0. Counts are int64, other sums float64, each ``[...]``, none below 0.
        """

    def adjust(self, sums: Sums, predictive: Predictive) -> Predictive:
        """Return calibrated predictions ``[1, S, B, C]`` (default: unchanged)."""
        return predictive

    def region(self, sums: Sums, predictive: Predictive, coverage: float) -> Tensor | None:
        """Return where a share `coverage` of targets lies, given predictions ``[1, S, B, C]``.

        Class membership ``[B, C]``, or lower and upper ends ``[2, B, T]``; None (the default) if
        this calibrator gives no regions.
        """
        return None

    def shortage(self, sums: Sums, coverage: float) -> str:
        """Return why sums ``[...]`` do not suffice for regions of this coverage; "" if they do."""
        return ""

    def unlike(self, sums: Sums, predictive: Predictive) -> Tensor | None:
        """Return which samples ``[B]`` are unlike the calibration samples (default: not known)."""
        return None

    def chosen(self, own: Sums, total: Sums) -> Sums:
        """Return the sums ``[...]`` that a client uses, of its `own` and the `total`.

        `own` is empty for a client whose sums are not in the total.
        """
        if not own or self.scope == "federated":
            return total
        weight = 0.0
        if self.scope == "shrunk":
            weight = min(1.0, self.others / max(float(total[EXAMPLES] - own[EXAMPLES]), 1.0))
        return {name: own[name] + weight * (total[name] - own[name]) for name in own}


@attrs.frozen(eq=False)
class Fitted:
    """A calibrator, and the sums ``[...]`` that one client uses."""

    calibrator: Calibrator
    sums: Sums

    def region(self, predictive: Predictive, coverage: float) -> Tensor | None:
        """Do as `Calibrator.region` ``[B, C]`` or ``[2, B, T]``."""
        return self.calibrator.region(self.sums, predictive, coverage)

    def unlike(self, predictive: Predictive) -> Tensor | None:
        """Do as `Calibrator.unlike` ``[B]``."""
        return self.calibrator.unlike(self.sums, predictive)


def answer(
    calibrators: Sequence[Calibrator], predicted: Iterable[tuple[Predictive, Tensor]]
) -> dict[str, Tensor]:
    """Return the sums ``[...]`` of all calibrators over predicted samples, by ``NAME.SUM``."""
    total: dict[str, Tensor] = {}
    for predictive, y in predicted:
        for one in calibrators:
            found = one.sums(predictive, y)
            found = {EXAMPLES: torch.tensor(len(y), device=y.device)} | found
            for name, tensor in found.items():
                key = f"{one.name}.{name}"
                total[key] = total[key] + tensor if key in total else tensor
    return total


def fit(
    calibrators: Sequence[Calibrator], client: int, own: Sums, total: Sums
) -> tuple[Fitted, ...]:
    """Return what a client calibrates with, of its `own` answer ``[...]`` and the `total`.

    The total is empty until the clients have answered: then there is nothing to calibrate with.
    """
    if not total:
        return ()
    counted = own if bool((total[ANSWERED] == client).any()) else {}
    return tuple(Fitted(one, one.chosen(_of(one, counted), _of(one, total))) for one in calibrators)


def adjust(fitted: Sequence[Fitted], predictive: Predictive) -> Predictive:
    """Return the predictions ``[1, S, B, C]`` as adjusted by each calibrator in turn."""
    for one in fitted:
        predictive = one.calibrator.adjust(one.sums, predictive)
    return predictive


def measure(fitted: Sequence[Fitted], predictive: Predictive, y: Tensor) -> dict[str, Tensor]:
    """Return figures ``[B]`` of samples: whether a region has the target, and how large it is.

    `predictive` holds the model's own predictions ``[1, S, B, C]``, `y` ``[B]`` or ``[B, T]`` the
    targets. A class is named ``set_coverage90`` and ``set_size90`` in classes, a real target
    ``interval_coverage90`` and ``interval_width90``, mean over targets; ``out_of_distribution`` is
    1 for a flagged sample.
    """
    found: dict[str, Tensor] = {}
    for one in fitted:
        for level in LEVELS:
            region = one.region(predictive, level / 100)
            if region is None:
                break
            if predictive.noise is None:
                found[f"set_coverage{level}"] = region.gather(1, y[:, None])[:, 0].double()
                found[f"set_size{level}"] = region.sum(1).double()
            else:
                inside = (region[0] <= y) & (y <= region[1])
                found[f"interval_coverage{level}"] = inside.double().mean(1)
                found[f"interval_width{level}"] = (region[1] - region[0]).mean(1)
        flagged = one.unlike(predictive)
        if flagged is not None:
            found["out_of_distribution"] = flagged.double()
    return found


def probabilities(predictive: Predictive) -> Tensor:
    """Return one client's class probabilities ``[B, C]`` in float64."""
    closed = predictive.closed_form
    return predictive.draws[0].double().mean(0) if closed is None else closed[0].double()


def moments(predictive: Predictive) -> tuple[Tensor, Tensor]:
    """Return the means and variances ``[B, T]`` of one client's targets in float64."""
    assert predictive.noise is not None  # noqa: S101 - a regression has noise
    draws, noise = predictive.draws[0].double(), predictive.noise.double()
    return draws.mean(0), draws.var(0, correction=0) + (noise[0] if noise.ndim else noise)


def _of(calibrator: Calibrator, sums: Sums) -> dict[str, Tensor]:
    prefix = f"{calibrator.name}."
    return {k.removeprefix(prefix): t for k, t in sums.items() if k.startswith(prefix)}
