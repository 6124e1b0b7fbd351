"""Local inference: how a client's data turns a prior into a posterior.

This module holds the seam (the types that pass between server and clients, and the abstract
`LocalInference`) and the declarations of the core's own inferences; their numerics live in
`bflcore.training`, `bflcore.point_estimation` and `bflcore.variational`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import attrs

from bflcore.options import Component, component, option
from bflcore.randomness import stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.likelihoods import Predictive
    from bflcore.posteriors import Posterior
    from bflcore.problem import Problem
    from bflcore.training import Batch

__all__ = [
    "Broadcast",
    "Cohort",
    "GradientInference",
    "LocalInference",
    "LocalResult",
    "Map",
    "PointInference",
    "Variational",
    "VariationalInference",
    "within",
]

PERSONAL = "personal."  # prefix, in a client's memory, of its posterior over personal coordinates

Part = Literal["all", "personal", "shared"]


def within(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


@attrs.frozen(eq=False)
class Broadcast:
    """What the server sends; also all that it keeps from one round to the next.

    `start` ``[P_shared]`` is the fused posterior, where local training begins; `prior`
    ``[P_shared]`` is what the hyperparameter update made of it, the anchor of the KL term;
    `hyper` holds any further server state by name.
    """

    round: int
    start: Posterior
    prior: Posterior
    hyper: Mapping[str, Tensor] = attrs.field(factory=dict)

    def pack(self) -> dict[str, Tensor]:
        """Return the tensors by name; what the prior shares with the start is there once."""
        start = self.start.pack()
        prior = {name: t for name, t in self.prior.pack().items() if t is not start[name]}
        return {
            **{f"start.{name}": tensor for name, tensor in start.items()},
            **{f"prior.{name}": tensor for name, tensor in prior.items()},
            **{f"hyper.{name}": tensor for name, tensor in self.hyper.items()},
        }

    @classmethod
    def unpack(cls, round: int, tensors: Mapping[str, Tensor], family: type[Posterior]) -> Self:
        """Rebuild a broadcast from what `pack` returned."""
        start = family.unpack(tensors, "start.")
        own = within(tensors, "prior.")
        prior = family.unpack(start.pack() | own) if own else start
        return cls(round, start, prior, within(tensors, "hyper."))


@attrs.frozen(eq=False)
class Cohort:
    """The clients that train together, and what each of them holds.

    `x` ``[K, N, ...]`` and `y` ``[K, N]`` or ``[K, N, T]`` are padded to the largest client;
    `sizes` are the true numbers of samples; `memory` ``[K, ...]`` is what each client kept from
    its last round. The engine orders clients by falling size, so that those which still have
    steps to take are always the first rows.
    """

    clients: tuple[int, ...]
    x: Tensor
    y: Tensor
    sizes: tuple[int, ...]
    memory: Mapping[str, Tensor]
    seed: int
    round: int

    def __attrs_post_init__(self) -> None:
        """Refuse an order in which the first rows are not those with the most steps."""
        if list(self.sizes) != sorted(self.sizes, reverse=True):
            raise ValueError(f"a cohort's sizes must fall; given: {self.sizes}")

    def streams(self, purpose: str) -> list[torch.Generator]:
        """Return one generator a client, on the device of the data, for `purpose`."""
        return [
            stream(self.seed, self.round, client, purpose, self.x.device) for client in self.clients
        ]


@attrs.frozen(eq=False)
class LocalResult:
    """What clients send back, client axis first; `memory` never leaves the client.

    `posterior` ``[K, P_shared]``; `statistics` ``[K, ...]`` travel too, for the hyperparameter
    update; `examples` ``[K]`` counts training samples; `loss` ``[K]`` is the mean negative log
    likelihood in nats per sample over the round's steps.
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


class LocalInference(Component, abc.ABC):
    """Base of local inferences.

    `fit` is batched over clients: a cohort of K gives what K cohorts of one give, to rounding.
    """

    kind: ClassVar[str] = "inference"
    family: ClassVar[str]  # name of the posterior family that `fit` returns
    # Claims that `bflcore.testing` checks:
    # exact-conjugate  Bayes' own posterior for linear regression with known noise, each sample
    #                  seeing one parameter
    tags: ClassVar[frozenset[str]] = frozenset()

    def check(self, problem: Problem) -> None:
        """Refuse a problem that this inference cannot work on: raise `OptionError`.

        Called once, before a run writes anything; by default every problem is welcome.
        """

    @abc.abstractmethod
    def initial(self, problem: Problem) -> Posterior:
        """Return the posterior ``[P]`` over all parameters before any data is seen."""

    def prior(self, problem: Problem) -> Posterior:
        """Return the first round's prior ``[P]``: by default the initial posterior."""
        return self.initial(problem)

    def remember(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of one client that has not taken part yet (no client axis).

        By default its posterior over the personal coordinates, as initialised.
        """
        return self.initial(problem).split(problem.layout)[1].pack(PERSONAL)

    @abc.abstractmethod
    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Infer every cohort member's posterior from its data, the start and the prior."""

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, novel: bool
    ) -> Mapping[str, Tensor]:
        """Return the memory ``[K, ...]`` with which the clients will predict.

        Called before each evaluation; a `novel` client was held out of training and may adapt
        here, from its training data. By default nothing changes.
        """
        return cohort.memory

    @abc.abstractmethod
    def predict(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Predictive:
        """Predict each client's own samples `x` ``[K, B, ...]``.

        `posterior` ``[P_shared]`` is the server's; `memory` ``[K, ...]`` the clients'.
        """

    def curves(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Mapping[str, Mapping[float, Predictive]]:
        """Predict `x` along quantities of the method: axis name -> value -> prediction.

        Arguments are those of `predict`. Evaluation measures every prediction on the clients'
        test samples, and the report draws the figures over the values; by default none.
        """
        return {}

    def landmarks(
        self, problem: Problem, posterior: Posterior, memory: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return one or two networks ``[K, P]`` by label, through which landscapes are drawn.

        By default the mean of what each client predicts with.
        """
        from bflcore import training

        clients = len(next(iter(memory.values()))) if memory else 1
        return {"client": training.predicting(problem, posterior, memory, clients).mean}


@component
class GradientInference(LocalInference):
    """Base of inferences that minimise an objective by minibatch gradients."""

    lr: float = option(1e-3, "learning rate", above=0)
    local_epochs: int = option(10, "passes over a client's data per round", at_least=1)
    batch_size: int = option(50, "samples per minibatch; the last batch may be smaller", at_least=1)
    optimiser: str = option("adam", "the update rule", choices=("adam", "sgd"))
    momentum: float = option(0.0, "momentum of sgd", at_least=0, below=1)
    lr_decay: float = option(0.0, "fraction by which lr falls each round", at_least=0, below=1)
    lr_decay_after: int = option(0, "round after which lr begins to fall", at_least=0)

    def lr_at(self, round: int) -> float:
        """Return the learning rate of a round (counted from 0)."""
        return self.lr * (1 - self.lr_decay) ** max(0, round - self.lr_decay_after)


@component
class PointInference(GradientInference):
    """Base of point estimates: everything but how they predict.

    Its objective is that of `Map`; `gradient` says how the likelihood is differentiated.
    """

    family = "point"

    anchor: float = option(0.0, "strength of the quadratic pull to the anchor", at_least=0)
    anchor_to: str = option(
        "prior",
        "where it pulls: to the prior's mean, or to where the round begins (FedProx)",
        choices=("prior", "start"),
    )
    weight_decay: float = option(0.0, "strength of the quadratic pull to zero", at_least=0)

    def initial(self, problem: Problem) -> Posterior:
        """Return the network's random initialisation as a point."""
        from bflcore.posteriors import Point

        return Point(problem.initial)

    def gradient(
        self, problem: Problem, cohort: Cohort
    ) -> Callable[[Tensor, Batch], tuple[Tensor, Tensor]]:
        """Return what computes losses ``[k]`` and gradients ``[k, P]`` at weights ``[k, P]``."""
        from bflcore import training

        return training.Gradient(problem)

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train every client from the broadcast."""
        from bflcore import point_estimation

        return point_estimation.fit(self, problem, broadcast, cohort)

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, novel: bool
    ) -> Mapping[str, Tensor]:
        """Fit a novel client's personal coordinates, the shared ones fixed."""
        from bflcore import point_estimation

        if not novel or not problem.layout.personal_total:
            return cohort.memory
        return point_estimation.fit(self, problem, broadcast, cohort, "personal").memory


@component
class Map(PointInference):
    """Find a point estimate: maximum likelihood, or MAP around the prior's mean.

    Minimises the mean negative log likelihood per sample + anchor/2 * ||w - centre||^2
    + weight_decay/2 * ||w||^2, the centre being the prior's mean or the round's start.
    """

    name = "map"
    reference = "McMahan et al. 2017, Algorithm 1; anchor: Li et al. 2020 (FedProx), eq. 2"

    def predict(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Predictive:
        """Predict with the point: one draw."""
        from bflcore import training

        whole = training.predicting(problem, posterior, memory, len(x))
        return problem.likelihood.predictive(problem.outputs(whole.mean[:, None], x))


@component
class VariationalInference(GradientInference):
    """Base of mean-field variational inferences: options and everything but `fit`."""

    family = "gaussian"

    estimator: str = option(
        "local-reparameterisation",
        "how the expected log likelihood's gradient is estimated",
        choices=("reparameterisation", "local-reparameterisation", "flipout"),
    )
    draws: int = option(1, "Monte-Carlo draws per minibatch (M)", at_least=1)
    kl_weight: float = option(1.0, "weight of the KL term (beta; the papers' zeta)", at_least=0)
    initial_sigma: float = option(
        0.0486, "initial standard deviation (0.0486: the papers' rho = -3)", above=0
    )
    prior_sigma: float | None = option(
        None, "first prior N(0, prior_sigma^2); none: the initial posterior", above=0
    )
    personal_prior: str = option(
        "initial",
        "prior of personal coordinates: the first one, or the client's own last posterior",
        choices=("initial", "previous"),
    )
    predict_draws: int = option(10, "parameter draws averaged in a prediction (S)", at_least=1)

    def initial(self, problem: Problem) -> Posterior:
        """Return a Gaussian around the network's initialisation."""
        from bflcore import variational

        return variational.initial(self, problem)

    def prior(self, problem: Problem) -> Posterior:
        """Return the first prior: N(0, prior_sigma^2), or the initial posterior."""
        from bflcore import variational

        return variational.prior(self, problem)

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, novel: bool
    ) -> Mapping[str, Tensor]:
        """Fit a novel client's personal coordinates, the shared posterior fixed."""
        from bflcore import variational

        if not novel or not problem.layout.personal_total:
            return cohort.memory
        return variational.fit(self, problem, broadcast, cohort, part="personal").memory

    def predict(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Predictive:
        """Average predictions over draws from the posterior."""
        from bflcore import variational

        return variational.predict(self, problem, posterior, memory, x, streams)


@component
class Variational(VariationalInference):
    """Fit a mean-field Gaussian by stochastic variational inference.

    Minimises E_q[-log p(y | x, w)] per sample + kl_weight/n * KL(q || prior).
    """

    name = "variational"
    reference = "Blundell et al. 2015, eq. 2; Kingma et al. 2015, eq. 6; Wen et al. 2018, eq. 4"

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train every client's Gaussian from the broadcast."""
        from bflcore import variational

        return variational.fit(self, problem, broadcast, cohort)
