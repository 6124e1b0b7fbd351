"""What passes between the server and its clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Self

import attrs

from bflcore.randomness import stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.posteriors import Posterior

__all__ = [
    "Answer",
    "Broadcast",
    "Cohort",
    "Evaluation",
    "LocalResult",
    "Personalised",
    "nbytes",
    "within",
]

SURVEY = "survey."  # prefix of what a broadcast's `hyper` holds of the survey
CALIBRATION = "calibration."  # prefix of what `hyper` holds of the calibration, at the end
REPORTED = "report."  # prefix of statistics that are summed for the user
KNOWN = "known prior"  # in place of a prior that clients know: a tensor without content


def within(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors ``[...]`` whose names begin with `prefix`, without the prefix."""
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Return how many bytes the numbers of the tensors ``[...]`` take."""
    return sum(tensor.nbytes for tensor in tensors.values())


@attrs.frozen(eq=False)
class Broadcast:
    """What the server sends; also all that it keeps from one round to the next.

    `start` ``[P_shared]`` is the fused posterior, where local training begins; `prior`
    ``[P_shared]`` is the prior of the KL term, set by the hyperparameter update;
    `hyper` holds any further server state by name, and what the survey gave. `first_prior`
    ``[P_shared]`` is the prior that an untrained inference has, which clients compute themselves.
    """

    round: int
    start: Posterior
    prior: Posterior
    hyper: Mapping[str, Tensor] = attrs.field(factory=dict)
    first_prior: Posterior | None = None

    @property
    def survey(self) -> dict[str, Tensor]:
        """The sums ``[...]`` of the survey, by name."""
        return within(self.hyper, SURVEY)

    @property
    def calibration(self) -> dict[str, Tensor]:
        """The sums ``[...]`` of the calibration, by name; empty before the last round's end."""
        return within(self.hyper, CALIBRATION)

    def followed_by(self, following: Broadcast) -> Broadcast:
        """Return the `following` round's broadcast with what never changes during a run.

        A calibration was that of an earlier round.
        """
        lasting = {name: t for name, t in self.hyper.items() if name.startswith(SURVEY)}
        new = {n: t for n, t in following.hyper.items() if not n.startswith(CALIBRATION)}
        hyper = {**lasting, **new}
        return attrs.evolve(following, hyper=hyper, first_prior=self.first_prior)

    def pack(self) -> dict[str, Tensor]:
        """Return the tensors by name; a prior's tensor that equals the start's is there once.

        Values are compared, not objects: a broadcast read from a checkpoint shares no memory.
        """
        start = self.start.pack()
        prior = {name: t for name, t in self.prior.pack().items() if not t.equal(start[name])}
        return {
            **{f"start.{name}": tensor for name, tensor in start.items()},
            **{f"prior.{name}": tensor for name, tensor in prior.items()},
            **{f"hyper.{name}": tensor for name, tensor in self.hyper.items()},
        }

    def sent(self) -> dict[str, Tensor]:
        """Return the tensors ``[...]`` sent to clients, without a prior that they know."""
        packed = self.pack()
        if self.first_prior is None or not any(name.startswith("prior.") for name in packed):
            return packed
        first = self.first_prior.pack()
        if not all(tensor.equal(first[name]) for name, tensor in self.prior.pack().items()):
            return packed
        known = {name: t for name, t in packed.items() if not name.startswith("prior.")}
        return known | {KNOWN: self.start.mean.new_empty(0)}

    @classmethod
    def unpack(
        cls,
        round: int,
        tensors: Mapping[str, Tensor],
        family: type[Posterior],
        first_prior: Callable[[dict[str, Tensor]], Posterior] | None = None,
    ) -> Self:
        """Rebuild a broadcast from the tensors ``[...]`` of `pack` or `sent`.

        `first_prior` computes, from the survey's sums, the prior that `sent` left out.
        """
        start = family.unpack(tensors, "start.")
        own, hyper = within(tensors, "prior."), within(tensors, "hyper.")
        if KNOWN in tensors:
            if first_prior is None:
                raise ValueError("the prior is missing, and is not known here")
            return cls(round, start, first_prior(within(hyper, SURVEY)), hyper)
        return cls(round, start, family.unpack(start.pack() | own) if own else start, hyper)


@attrs.frozen(eq=False)
class Cohort:
    """The clients that train together, and what each of them holds.

    `x` ``[K, N, ...]`` and `y` ``[K, N]`` or ``[K, N, T]`` are padded to the largest client;
    `sizes` are the true numbers of samples; `memory` ``[K, ...]`` is what each client kept from
    its last round (see `bflcore.inference.memory`); `novel` says that these clients were held out
    of training. The engine orders clients by falling size, so that those which still have steps to
    take are always the first rows.
    """

    clients: tuple[int, ...]
    x: Tensor
    y: Tensor
    sizes: tuple[int, ...]
    memory: Mapping[str, Tensor]
    seed: int
    round: int
    novel: bool = False

    def __attrs_post_init__(self) -> None:
        """Raise `ValueError` unless the clients are ordered by falling size."""
        if list(self.sizes) != sorted(self.sizes, reverse=True):
            raise ValueError(f"a cohort's sizes must fall; given: {self.sizes}")

    def streams(self, purpose: str) -> list[torch.Generator]:
        """Return one generator per client, on the device of the data, for `purpose`."""
        return [
            stream(self.seed, self.round, client, purpose, self.x.device) for client in self.clients
        ]


@attrs.frozen(eq=False)
class LocalResult:
    """What clients send back, client axis first; `memory` never leaves the client.

    `posterior` ``[K, P_shared]``; `statistics` ``[K, ...]`` are sent too, for the hyperparameter
    update, and those called ``report.NAME`` for the user, who reads their sum as
    ``inference.NAME``; `examples` ``[K]`` counts training samples; `loss` ``[K]`` is the mean
    negative log likelihood in nats per sample over the round's steps.
    """

    clients: tuple[int, ...]
    posterior: Posterior
    examples: Tensor
    loss: Tensor
    statistics: Mapping[str, Tensor] = attrs.field(factory=dict)
    memory: Mapping[str, Tensor] = attrs.field(factory=dict)

    def select(self, rows: list[int]) -> LocalResult:
        """Keep some of the clients."""
        return LocalResult(
            tuple(self.clients[row] for row in rows),
            self.posterior[rows],
            self.examples[rows],
            self.loss[rows],
            {name: tensor[rows] for name, tensor in self.statistics.items()},
            {name: tensor[rows] for name, tensor in self.memory.items()},
        )


@attrs.frozen(eq=False)
class Answer:
    """One client's sums ``[...]``.

    They are over its training data before round 1 (the survey), or over its calibration samples
    after the last round.
    """

    client: int
    sums: Mapping[str, Tensor]


@attrs.frozen(eq=False)
class Evaluation:
    """Sums of one client's metrics on its own samples (see `bflcore.problem.metrics`).

    The samples are its test samples, or its validation samples where `validation` is true.

    `personal`: the client's own model; `shared`: the server's model on the same samples, where
    it is a complete model and a different one; `curves`: the sums of the predictions that
    `LocalInference.curves` names, axis -> value -> sums; `calibrated`: the client's own model
    once it is calibrated, empty before; `ood`: the sums that tell the client's test samples from
    foreign ones (`bflcore.problem.ood`), in the last round and where there are such samples.
    """

    client: int
    personal: Mapping[str, Tensor]
    shared: Mapping[str, Tensor] | None
    curves: Mapping[str, Mapping[float, Mapping[str, Tensor]]] = attrs.field(factory=dict)
    validation: bool = False
    calibrated: Mapping[str, Tensor] = attrs.field(factory=dict)
    ood: Mapping[str, Tensor] | None = None


@attrs.frozen(eq=False)
class Personalised:
    """The memory ``[...]`` with which one client predicts; None if it is the one it stored.

    `calibration` are its own sums ``[...]``, where a calibrator uses them.
    """

    client: int
    memory: Mapping[str, Tensor] | None
    calibration: Mapping[str, Tensor] = attrs.field(factory=dict)
