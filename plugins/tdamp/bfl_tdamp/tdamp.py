"""The inference `tdamp`: turbo deep approximate message passing (Xu et al. 2024, Algorithm 1).

This module sweeps over minibatches; `message_passing` processes one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import attrs

from bfl_tdamp.message_passing import Pace, State, forward_pass, own, pass_messages, temper
from bfl_tdamp.network import chain, layers, parameter_names
from bfl_tdamp.posterior import CERTAIN, BernoulliGaussian, groups
from bflcore import (
    Examples,
    IncompatibleError,
    LocalInference,
    OptionError,
    Predictive,
    component,
    option,
)
from bflcore.inference.gradient import batches, mean_loss, steps
from bflcore.inference.memory import Memory, join_personal, local_result
from bflcore.lazy import lazy
from bflcore.problem.likelihoods import Categorical, GaussianNoise
from bflcore.randomness import SERVER, stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bfl_tdamp import channels
    from bfl_tdamp.channels import Output
    from bflcore import (
        Aggregator,
        Broadcast,
        Cohort,
        Component,
        LocalResult,
        Posterior,
        Problem,
    )
    from bflcore.inference.gradient import Batch
else:
    channels = lazy("bfl_tdamp.channels")
    torch = lazy("torch")

__all__ = ["Tdamp", "TdampMemory", "outputs"]


@attrs.frozen(eq=False, kw_only=True)
class TdampMemory(Memory):
    """The memory of a client: the last change of every slab's mean ``[P]``."""

    velocity: Tensor


@component
class Tdamp(LocalInference):
    """Infer weights by approximate message passing over minibatches, without a learning rate.

    For networks of linear layers with ReLU between them. Every sweep processes each minibatch once;
    the posterior after one minibatch is the prior of the next.
    """

    name = "tdamp"
    reference = "Xu, Liu, Zhang & Lau 2024, Algorithm 1, eq. 15-27"
    family = "bernoulli-gaussian"
    expected_failures = MappingProxyType(
        {
            "predictions follow seed and round": "only the sample on which the network's wiring is "
            "tried is random; predictions are in closed form"
        }
    )

    local_epochs: int = option(10, "sweeps over a client's data per round (tau)", at_least=1)
    batch_size: int = option(
        100, "samples per minibatch; the last batch may be smaller", at_least=1
    )
    variance: float | None = option(
        None,
        "initial prior variance of biases and, divided by the number of inputs, of weights (none: "
        "10 for classification, 0.5 for regression)",
        above=0,
    )
    noise: float = option(1.0, "initial variance of the observation noise", above=0)
    rho: float = option(
        1.0,
        "initial probability that a group of weights is not zero (1: groups are never removed by "
        "the data)",
        above=0,
        at_most=1,
    )
    forgetting: float = option(
        0.96,
        "fraction of the precision retained after the first round (lambda); each of its tau sweeps "
        "retains lambda^(1/tau)",
        above=0,
        at_most=1,
    )
    fading: float | None = option(
        None, "number of rounds after which forgetting has halved (none: it is constant)", above=0
    )
    momentum: float = option(
        0.8,
        "fraction of a minibatch's change of the means that the next one repeats",
        at_least=0,
        below=1,
    )
    line_search: bool = option(
        True, "step lengths of the means that maximise a local quadratic (false: full steps)"
    )
    pooled: bool = option(
        True,
        "weight n/n_k on the likelihood of client k, so that the geometric mean weighted by "
        "examples counts every sample once per sweep",
    )
    centred: bool = option(True, "expansion of the first layer around its mean input")
    output_scale: float = option(
        0.1,
        "scale of the last layer's initial means (below 1: outputs start near zero)",
        above=0,
    )
    count_once: bool = option(True, "predictive variances as if every sample had been counted once")
    predictive: str = option(
        "moments",
        "quantities propagated for prediction: `moments`, or posterior means alone (`mean`)",
        choices=("moments", "mean"),
    )

    def check(self, problem: Problem) -> None:
        """Raise an error unless message passing supports the problem.

        `IncompatibleError` for a network that is not a chain of linear layers with ReLU between
        them, `OptionError` unless a regression has one output per target, for a likelihood other
        than `categorical` and `gaussian`, and for one with offsets: messages do not pass it.
        """
        if problem.likelihood.counts_labels:
            raise OptionError(
                f"likelihood.label_prior: inference {self.name} has no label prior; leave it out"
            )
        last = problem.network.get_submodule(chain(problem)[-1])
        targets = problem.train.y.shape[-1]
        if not isinstance(problem.likelihood, Categorical | GaussianNoise):
            raise OptionError(
                f"--likelihood: {problem.likelihood.name} has no messages in {self.name}; allowed: "
                "categorical, gaussian"
            )
        if problem.likelihood.task == "regression" and last.out_features != targets:
            raise OptionError(
                f"inference tdamp: the model has {last.out_features} outputs for {targets} "
                "regression target(s); allowed: one output per target"
            )

    def check_parts(self, parts: Mapping[str, Component]) -> None:
        """Raise `IncompatibleError` unless the weights undo the factor n/n_k of `pooled`."""
        aggregator = cast("Aggregator", parts["aggregator"])
        if self.pooled and not (aggregator.weighs and isinstance(parts["weighting"], Examples)):
            part = parts["weighting"] if aggregator.weighs else aggregator
            raise IncompatibleError(
                f"inference tdamp: {part.kind} {part.name} does not weigh client k by n_k/n, which "
                "pooled = true relies on; allowed: --weighting examples with an aggregator that "
                "weighs, or -o inference.pooled=false"
            )

    def survey(self, problem: Problem, cohort: Cohort) -> Mapping[str, Tensor]:
        """Return the number of samples ``[K]`` and, if centred, the sum of inputs ``[K, N]``."""
        answers = super().survey(problem, cohort)
        if not self.centred:
            return answers
        x = cohort.x.flatten(2)
        rows = torch.arange(x.shape[1], device=x.device)
        real = rows < answers["examples"][:, None]
        return {**answers, "inputs": x.double().masked_fill(~real[..., None], 0).sum(1)}

    def initial(self, problem: Problem) -> Posterior:
        """Return slabs N(m, v_0/n) ``[P]``, m ~ N(0, c/n) with c = 2 after a ReLU and else c = 1.

        n is the number of inputs; biases have N(0, v_0). The first layer is centred at the mean
        input, as surveyed; the centres of the others are 0.
        """
        order, columns = chain(problem), groups(problem.layout)
        mean = _first_means(problem, order, self.output_scale)
        log_odds = mean.new_full((columns.total,), float(torch.logit(torch.tensor(self.rho))))
        centre = torch.zeros_like(log_odds)
        if self.centred and problem.survey:
            first = parameter_names(problem.layout, order[0])[0]
            known = problem.survey
            centre[columns.slices[first]] = (known["inputs"] / known["examples"]).to(centre.dtype)
        return BernoulliGaussian.of(
            problem.layout,
            mean,
            self.first_variance(problem),
            log_odds.clamp(-CERTAIN, CERTAIN),
            centre,
            self.noise,
        )

    def first_variance(self, problem: Problem) -> Tensor:
        """Return the initial variances of the slabs ``[P]``: v_0, divided by n for weights."""
        v_0 = self.variance or (10.0 if problem.likelihood.task == "classification" else 0.5)
        layout, variance = problem.layout, torch.full_like(problem.initial, v_0)
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            if len(shape) == 2:
                variance[layout.slices[name]] /= shape[1]
        return variance

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return a memory with velocity 0 and the initial personal posterior."""
        still = TdampMemory(velocity=torch.zeros_like(problem.initial))
        return super().initial_memory(problem) | still.pack()

    def retention(self, round: int) -> float:
        """Return the fraction of the precision retained after each of a round's tau sweeps.

        lambda^(1/tau), so that a round retains lambda however many sweeps it has: what a round
        forgets is replaced by evidence of the clients' own samples, tau times over.
        """
        slower = 1 + round / self.fading if self.fading else 1.0
        kept: float = (1 - (1 - self.forgetting) / slower) ** (1 / self.local_epochs)
        return kept

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Infer every client's posterior from the start, sweep by sweep (Algorithm 1)."""
        q = own(join_personal(problem, broadcast.start, cohort)).map(torch.clone)
        prior = own(join_personal(problem, broadcast.prior, cohort))
        velocity = TdampMemory.unpack(cohort.memory, BernoulliGaussian).velocity.clone()
        state = State.of(problem, chain(problem), q, velocity, prior)
        classifies = problem.likelihood.task == "classification"
        channel = channels.probit_output if classifies else channels.gaussian_output
        copies = q.noise.new_tensor(_copies(self, problem, cohort))[:, None, None]
        pace = Pace(self.line_search, self.momentum)
        last_sweep = LastSweep.of(self, cohort, q.noise[:, 0])
        loss = q.noise.new_zeros(len(cohort.clients))
        for step, batch in enumerate(batches(self, cohort)):
            k = len(batch.sizes)
            active = state.rows(k)
            output = pass_messages(active, batch, channel, copies[:k], pace)
            self._end_sweep(active, q.counted[:k], cohort, step + 1)
            nll = output.nll
            loss[:k] += nll.mean(1) if batch.weight is None else (nll * batch.weight).sum(1)
            last_sweep.add(step, output, batch)
        return local_result(
            problem,
            cohort,
            q,
            mean_loss(loss, steps(self, cohort)),
            last_sweep.means(),
            TdampMemory(velocity=velocity),
        )

    def _end_sweep(self, state: State, counted: Tensor, cohort: Cohort, taken: int) -> None:
        """Temper, in place, the posteriors of clients whose step number `taken` ends a sweep.

        PasP with lambda < 1 (eq. 27) and the round's prior; `counted` ``[k, 1]`` is how many times
        the precisions count the data.
        """
        ends = [taken % n == 0 for n in _minibatches(self, cohort)[: len(counted)]]
        if not any(ends):
            return
        retained = self.retention(cohort.round)
        share = counted.new_tensor([retained if end else 1.0 for end in ends])[:, None]
        counted.add_(counted.new_tensor(ends)[:, None]).mul_(share)
        temper(state, share)

    def predict(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, x: Tensor
    ) -> Predictive:
        """Predict in closed form: class probabilities, or means and variances of targets.

        The means are those of training. The variances are those of a posterior that counts the data
        once (`count_once`); repeated sweeps would make the weights overconfident. A Gaussian target
        is represented by two draws, mean +- deviation, which have its moments.
        """
        q = own(join_personal(problem, broadcast.start, cohort))
        if self.count_once:
            q = q.once(self.first_variance(problem))
        p, variance = outputs(problem, q, x, self.predictive)
        if problem.likelihood.task == "classification":
            found = channels.probit_probabilities(p, variance, q.noise[:, None])
            return Predictive(found[:, None])
        deviation = variance.sqrt()
        return Predictive(torch.stack([p - deviation, p + deviation], 1), q.noise[0, 0])


@attrs.frozen(eq=False)
class LastSweep:
    """Moments over each client's last sweep, from which the server learns the noise variance.

    `first` ``[K]`` is the first step of the sweep, `samples` ``[K]`` the number of samples seen
    since, and `sums` ``[K]`` the sum of each moment; both are changed in place.
    """

    first: Tensor
    samples: Tensor
    sums: dict[str, Tensor] = attrs.field(factory=dict)

    @classmethod
    def of(cls, inference: Tdamp, cohort: Cohort, like: Tensor) -> LastSweep:
        """Return empty sums with the dtype and device of `like`."""
        before = [(inference.local_epochs - 1) * n for n in _minibatches(inference, cohort)]
        first = torch.tensor(before, device=like.device)
        return cls(first, like.new_zeros(len(cohort.clients)))

    def add(self, step: int, output: Output, batch: Batch) -> None:
        """Add the moments of step number `step`, for the clients that are in their last sweep."""
        k = len(batch.sizes)
        real = (self.first[:k] <= step).to(output.nll)[:, None].expand_as(output.nll)
        if batch.weight is not None:
            real = real * (batch.weight > 0)
        self.samples[:k] += real.sum(1)
        for name, values in output.residuals.items():
            total = self.sums.setdefault(name, torch.zeros_like(self.samples))
            total[:k] += (values * real).sum(1)

    def means(self) -> dict[str, Tensor]:
        """Return the mean of each moment ``[K]`` by name (0 for a client without samples)."""
        return {name: total / self.samples.clamp_min(1) for name, total in self.sums.items()}


def outputs(
    problem: Problem, posterior: BernoulliGaussian, x: Tensor, predictive: str = "moments"
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the outputs ``[K, B, C]`` for `x` ``[K, B, ...]``.

    With ``predictive = "mean"`` only the posterior means are propagated; the variance is zero.
    """
    net = layers(problem, posterior, chain(problem))
    if predictive == "moments":
        last = forward_pass(net, x.flatten(2))[-1]
        return last.p, last.variance
    u = x.flatten(2)
    for depth, layer in enumerate(net):
        u = (u.relu() if depth else u) - layer.centre[:, None]
        u = u @ layer.moments().mean.mT
        if layer.bias is not None:
            u = u + layer.bias.mean
    return u, torch.zeros_like(u)


def _minibatches(inference: Tdamp, cohort: Cohort) -> list[int]:
    """Return the number of minibatches per sweep of each client (1 without samples)."""
    return [max(1, -(-size // inference.batch_size)) for size in cohort.sizes]


def _copies(inference: Tdamp, problem: Problem, cohort: Cohort) -> list[float]:
    """Return how many times each client counts each of its samples: n / n_k.

    The geometric mean raises client k's posterior to the power n_k / n. With prior p and
    likelihoods l_k, prod_k (p l_k^(n / n_k))^(n_k / n) = p prod_k l_k: a sweep counts data once.
    """
    total = int(problem.survey["examples"]) if inference.pooled else 0
    return [total / size if total and size else 1.0 for size in cohort.sizes]


def _first_means(problem: Problem, order: list[str], output_scale: float) -> Tensor:
    """Return random means ``[P]`` of the weights, to break the symmetry; biases are 0."""
    draws = stream(problem.seed, SERVER, SERVER, "tdamp", problem.device)
    layout, mean = problem.layout, torch.zeros_like(problem.initial)
    for depth, path in enumerate(order):
        name = f"{path}.weight".lstrip(".")
        rows, columns = layout.shapes[layout.names.index(name)]
        scale = ((1 if depth == 0 else 2) / columns) ** 0.5
        scale *= output_scale if depth == len(order) - 1 else 1
        drawn = torch.randn(rows * columns, generator=draws, device=mean.device)
        mean[layout.slices[name]] = scale * drawn.to(mean.dtype)
    return mean
