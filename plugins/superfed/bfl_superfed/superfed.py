"""SuPerFed: a federated and a local model, connected by a segment of low loss.

Hahn, Jeong & Lee 2022, Algorithm 1. Every client trains the shared federated model w_f and its own
local model w_l at random mixtures of the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from bfl_superfed import prediction
from bfl_superfed.mixing import Objective, train
from bflcore import GradientInference, Point, component, option
from bflcore.inference.gradient import Gradient
from bflcore.inference.memory import (
    OwnPosterior,
    client_posterior,
    join_personal,
    keep_own,
    local_result,
)
from bflcore.inference.point import descend
from bflcore.lazy import lazy
from bflcore.randomness import SERVER, stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Posterior, Predictive, Problem
    from bflcore.inference.gradient import Batch
else:
    torch = lazy("torch")

__all__ = ["LowLossSubspace", "SegmentMemory", "initial_local_models"]


@attrs.frozen(eq=False, kw_only=True)
class SegmentMemory(OwnPosterior):
    """The memory of clients: w_l as `own`, and the lambda for prediction."""

    chosen_lambda: Tensor | None = None  # [K]


@component
class LowLossSubspace(GradientInference):
    """Train a federated and a local model so that all mixtures of the two have low loss (eq. 3).

    Minimises NLL(W(lambda)) per sample + mu * prox(w_f, w_g) + nu * cos(w_f, w_l)^2 with
    W(lambda) = (1 - lambda) w_f + lambda w_l, with a new lambda ~ U(0, 1) for every minibatch.
    """

    name = "low-loss-subspace"
    reference = "Hahn, Jeong & Lee 2022 (SuPerFed), eq. 3, sections 3.4 and 3.5"
    family = "point"

    mixing: str = option(
        "model",
        "scope of a lambda: the whole `model` or each `layer`",
        choices=("model", "layer"),
    )
    mu: float = option(
        0.01,
        "strength of the penalty on the distance of the federated model to the server's",
        at_least=0,
    )
    nu: float = option(
        1.0, "strength of the penalty on the squared cosine of the two models", at_least=0
    )
    prox: str = option(
        "squared",
        "penalty weighted by mu: `squared` (half the squared distance) or `norm` (sum over tensors "
        "of distances)",
        choices=("squared", "norm"),
    )
    start: float = option(
        0.4,
        "fraction of the rounds before the local model is trained (L; 1 = never)",
        at_least=0,
        at_most=1,
    )
    lambda_selection: str = option(
        "validation",
        "lambda used for prediction: `validation` (best on held-out training samples), `fixed`, or "
        "`ensemble` (average over the segment)",
        choices=("validation", "fixed", "ensemble"),
    )
    ensemble_prior: str = option(
        "falling",
        "density of lambda for `ensemble`: `uniform`, or `falling` (2 (1 - lambda), nearer the "
        "federated model)",
        choices=("falling", "uniform"),
    )
    fixed_lambda: float = option(
        0.5, "lambda for `fixed`, and for clients without validation samples", at_least=0, at_most=1
    )
    validation_fraction: float = option(
        0.1, "fraction of the training samples held out to choose lambda", above=0, below=1
    )
    weight_decay: float = option(0.0, "strength of the quadratic penalty around zero", at_least=0)

    def initial(self, problem: Problem) -> Posterior:
        """Return the network's random initialisation as a point."""
        return Point(problem.initial)

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of a client that does not have a local model yet."""
        none = OwnPosterior.empty(self.initial(problem))
        return super().initial_memory(problem) | none.pack()

    def objective(self, problem: Problem) -> Objective:
        """Return the objective (eq. 3) for these options."""
        return Objective(
            problem.layout, self.mixing, self.mu, self.nu, self.prox, self.weight_decay
        )

    def personalises(self, problem: Problem, round: int) -> bool:
        """Return whether the local model is trained in a round (counted from 0).

        It is from round floor(L R) on, or from the first round if R is unknown.
        """
        begin = math.floor(self.start * problem.rounds + 1e-9)  # 0.29 * 100 is 28.999...
        return self.start < 1 and round >= begin

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train both models, or only the federated one before personalisation starts."""
        server = join_personal(problem, broadcast.start, cohort).mean
        seen = self.hold_out(problem, cohort)[0]
        if not self.personalises(problem, broadcast.round):
            weights, loss = self.descend_alone(problem, seen, server)
            return local_result(problem, cohort, Point(weights), loss)
        local = initial_local_models(problem, cohort)
        models, loss = train(self, self.objective(problem), problem, seen, server, local)
        w_f, w_l = (Point(w.clone()) for w in models.unbind(1))
        own = OwnPosterior(own=w_l, started=torch.ones_like(loss))
        return local_result(problem, cohort, w_f, loss, memory=own)

    def descend_alone(
        self, problem: Problem, cohort: Cohort, server: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Train w_f ``[K, P]`` at lambda = 0: FedAvg, or FedProx if mu > 0."""
        objective, differentiate = self.objective(problem), Gradient(problem)

        def loss_and_gradient(w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            nll, gradient = differentiate(w, batch)
            if self.mu:
                pull = objective.prox_gradient(w - server[: len(w)])
                gradient = gradient.add(pull, alpha=self.mu)
            if self.weight_decay:
                gradient = gradient.add(w, alpha=self.weight_decay)
            return nll, gradient

        return descend(self, problem, cohort, server, loss_and_gradient)

    def hold_out(self, problem: Problem, cohort: Cohort) -> tuple[Cohort, list[Tensor]]:
        """Split each client's samples into a training cohort and the rows ``[V]`` for validation.

        The split is the same in every round. Nothing is held out unless lambda is validated.
        """
        if self.lambda_selection != "validation" or self.start == 1:
            return cohort, [torch.empty(0, dtype=torch.int64)] * len(cohort.sizes)
        held, kept = [], []
        for client, size in zip(cohort.clients, cohort.sizes, strict=True):
            order = torch.randperm(size, generator=_stream(problem, client, "validation"))
            count = max(1, int(self.validation_fraction * size)) if size > 1 else 0
            held.append(order[:count])
            kept.append(order[count:].sort().values)
        index = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True).to(cohort.x.device)
        rows = torch.arange(len(kept), device=index.device)[:, None]
        x, y, sizes = cohort.x[rows, index], cohort.y[rows, index], tuple(map(len, kept))
        return attrs.evolve(cohort, x=x, y=y, sizes=sizes), held

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Choose lambda; novel clients first train for a round, with w_l starting from w_g."""
        if cohort.novel:
            server = join_personal(problem, broadcast.start, cohort)
            begun = keep_own(cohort.memory, server.map(torch.clone))
            fitted = self.fit(problem, broadcast, attrs.evolve(cohort, memory=begun))
            cohort = attrs.evolve(cohort, memory=fitted.memory)
        if self.lambda_selection != "validation":
            return cohort.memory
        chosen = SegmentMemory(chosen_lambda=self.validate(problem, broadcast, cohort))
        return {**cohort.memory, **chosen.pack()}

    def validate(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> Tensor:
        """Return the lambda ``[K]`` chosen on each client's held-out samples."""
        w_f, w_l = _ends(problem, broadcast, cohort)
        chosen = w_f.new_full((len(w_f),), self.fixed_lambda)
        for row, held in enumerate(self.hold_out(problem, cohort)[1]):
            if len(held):
                index = held.to(cohort.x.device)
                x, y = cohort.x[row, index], cohort.y[row, index]
                chosen[row] = prediction.choose_lambda(problem, w_f[row], w_l[row], x, y)
        return chosen

    def predict(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Predictive:
        """Predict with each client's lambda (S = 1), or with all those of the ensemble (S = 11)."""
        w_f, w_l = _ends(problem, broadcast, cohort)
        return prediction.predict_mixtures(problem, w_f, w_l, self._lambdas(cohort, w_f), x)

    def posterior(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> Point:
        """Return the network of each client's lambda; of an ensemble, the mean of its networks."""
        w_f, w_l = _ends(problem, broadcast, cohort)
        return Point(torch.lerp(w_f, w_l, self._lambdas(cohort, w_f).mean(1, keepdim=True)))

    def _lambdas(self, cohort: Cohort, like: Tensor) -> Tensor:
        """Return the lambdas ``[K, S]`` with which the clients predict."""
        chosen = SegmentMemory.unpack(cohort.memory, Point).chosen_lambda
        if self.lambda_selection == "ensemble":
            return like.new_tensor(prediction.PRIORS[self.ensemble_prior]).expand(len(like), -1)
        if chosen is not None:
            return chosen[:, None]
        return like.new_full((len(like), 1), self.fixed_lambda)

    def curves(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Mapping[str, Mapping[float, Predictive]]:
        """Predict with each lambda of the grid."""
        w_f, w_l = _ends(problem, broadcast, cohort)
        return {
            "lambda": {
                at: prediction.predict_mixtures(problem, w_f, w_l, w_f.new_full((len(x), 1), at), x)
                for at in prediction.GRID
            }
        }

    def landmarks(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort
    ) -> Mapping[str, Tensor]:
        """Return the ends of the segment, w_f and w_l ``[K, P]``."""
        w_f, w_l = _ends(problem, broadcast, cohort)
        return {"federated": w_f, "local": w_l}


def initial_local_models(problem: Problem, cohort: Cohort) -> Tensor:
    """Return w_l ``[K, P]`` at the start of a round: from memory, or else random."""
    memory = OwnPosterior.unpack(cohort.memory, Point)
    if memory.own is None or memory.started is None:
        raise KeyError("the clients' memory has no local models")
    return torch.stack(
        [
            own if started else _random_start(problem, client)
            for client, started, own in zip(
                cohort.clients, memory.started.tolist(), memory.own.mean, strict=True
            )
        ]
    )


def _random_start(problem: Problem, client: int) -> Tensor:
    """Return a random initialisation ``[P]``: the elements of each initial tensor, permuted.

    Elements of a random initialisation are exchangeable, so this is a draw from the same
    distribution without PyTorch's global generator.
    """
    noise = _stream(problem, client, "local model")
    pieces = problem.initial.split(problem.layout.sizes)
    return torch.cat([p[torch.randperm(len(p), generator=noise).to(p.device)] for p in pieces])


def _stream(problem: Problem, client: int, purpose: str) -> torch.Generator:
    return stream(
        problem.seed, SERVER, client, purpose
    )  # independent of the round: drawn once per run


def _ends(problem: Problem, broadcast: Broadcast, cohort: Cohort) -> tuple[Tensor, Tensor]:
    """Return w_f and w_l ``[K, P]``; for a client without a local model, w_f twice."""
    federated = join_personal(problem, broadcast.start, cohort)
    return federated.mean, client_posterior(problem, broadcast, cohort).mean
