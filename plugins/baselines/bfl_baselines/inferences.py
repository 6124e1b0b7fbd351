"""Declarations of the local inferences; their numerics are in the module each names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, cast

import attrs

from bfl_bpfed.plugin import ReinforcedVariational
from bflcore import GradientInference, LocalInference, Map, OptionError, component, option
from bflcore.inference.memory import PERSONAL
from bflcore.randomness import SERVER

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore import Broadcast, Cohort, LocalResult, Posterior, Predictive, Problem


class Written(LocalInference):
    """Mix-in of inferences whose `fit` is a function of this package."""

    numerics: ClassVar[str]  # module.function

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train every client as the method's function says."""
        module, _, function = self.numerics.partition(".")
        fit = getattr(import_module(f"bfl_baselines.{module}"), function)
        return cast("LocalResult", fit(self, problem, broadcast, cohort))


class Keeping(LocalInference):
    """Mix-in of inferences whose clients keep a whole posterior of their own to predict with."""

    def remember(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of a client without one yet."""
        from bflcore.inference.memory import no_own

        return {**super().remember(problem), **no_own(self.initial(problem))}

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, novel: bool
    ) -> Mapping[str, Tensor]:
        """Let a novel client train as in a round, and send nothing."""
        return self.fit(problem, broadcast, cohort).memory if novel else cohort.memory


@component
class Staged(Map):
    """Train head and body together, in turn, or the body alone; fine-tune before predicting."""

    name = "staged"
    reference = "Collins et al. 2021 (FedRep), Algorithm 1; Oh et al. 2022 (FedBABU), Algorithm 1"

    stages: str = option(
        "joint",
        "what a round trains: all, the personal part and then the shared one, or that alone",
        choices=("joint", "personal-then-shared", "shared"),
    )
    personal_epochs: int = option(10, "epochs of the personal part's own stage", at_least=1)
    fine_tune_epochs: int = option(
        0, "epochs on all coordinates before each evaluation; what travels keeps out", at_least=0
    )

    def check(self, problem: Problem) -> None:
        """Refuse stages of a network that is not divided."""
        layout = problem.layout
        if self.stages != "joint" and not (layout.personal_total and layout.shared_total):
            raise OptionError(
                f"inference.stages: {self.stages!r} needs a shared and a personal part, and here "
                "one of them is empty; use --share body, --share head or -o inference.stages=joint"
            )

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train the stages."""
        from bfl_baselines.slopes import replace
        from bflcore.inference.point import fit_points

        if self.stages == "joint":
            return fit_points(self, problem, broadcast, cohort)
        if self.stages == "personal-then-shared":
            first = replace(self, local_epochs=self.personal_epochs)
            personal = fit_points(first, problem, broadcast, cohort, "personal")
            cohort = attrs.evolve(cohort, memory=personal.memory)
        return fit_points(self, problem, broadcast, cohort, "shared")

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, novel: bool
    ) -> Mapping[str, Tensor]:
        """Fit a novel client's personal part, then fine-tune."""
        from bfl_baselines import slopes

        memory = super().personalise(problem, broadcast, cohort, novel)
        if not self.fine_tune_epochs:
            return memory
        longer = slopes.replace(self, local_epochs=self.fine_tune_epochs)
        cohort = attrs.evolve(cohort, memory=memory)
        return slopes.fine_tuned(longer, problem, broadcast, cohort)


@component
class Ditto(Keeping, Written, Map):
    """Train the shared network as FedAvg does, and one's own, pulled towards the server's."""

    name = "ditto"
    reference = "Li et al. 2021 (Ditto), Algorithm 1"
    numerics = "slopes.ditto"

    pull: float = option(0.1, "strength of the pull of one's own network (lambda)", at_least=0)


@component
class AdaptiveMixture(Keeping, Written, Map):
    """Train the shared network as FedAvg does, and one's own through their mixture."""

    name = "apfl"
    reference = "Deng, Kamani & Mahdavi 2020 (APFL), Algorithm 1 and eq. 10"
    numerics = "slopes.apfl"

    alpha: float = option(0.5, "first share of one's own network", at_least=0, at_most=1)
    adaptive: bool = option(True, "whether alpha descends the mixture's loss, once a round")

    def remember(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory with the first alpha, and no v yet."""
        alpha = problem.initial.new_tensor(self.alpha)
        return {**super().remember(problem), "alpha": alpha, "v": 0 * problem.initial}


@component
class MoreauEnvelope(Keeping, Written, Map):
    """Descend the Moreau envelope of the loss: the minimiser that it contains is one's own."""

    name = "pfedme"
    reference = "Dinh, Tran & Nguyen 2020 (pFedMe), Algorithm 1"
    numerics = "slopes.pfedme"

    pull: float = option(15.0, "strength of the pull to the shared network (lambda)", above=0)
    inner_steps: int = option(5, "steps that approximate the minimiser (K)", at_least=1)
    personal_lr: float = option(0.05, "learning rate of those steps", above=0)


@component
class MetaLearning(Written, Map):
    """Train a network that is good after one step of adaptation (first-order MAML)."""

    name = "per-fedavg"
    reference = "Fallah, Mokhtari & Ozdaglar 2020 (Per-FedAvg), Algorithm 1, Hessian dropped"
    numerics = "slopes.per_fedavg"

    inner_lr: float = option(0.01, "learning rate of the adaptation (alpha)", above=0)

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, novel: bool
    ) -> Mapping[str, Tensor]:
        """Adapt by one step on all of a client's samples."""
        from bfl_baselines import slopes

        once = slopes.replace(
            self, optimiser="sgd", momentum=0.0, lr=self.inner_lr, lr_decay=0.0, local_epochs=1,
            batch_size=max(1, *cohort.sizes),
        )  # fmt: skip
        return slopes.fine_tuned(once, problem, broadcast, cohort)


@component
class ControlVariates(Written, Map):
    """Correct every step by the difference of the server's and the client's control variates.

    Goes with ``--hyper accumulate``, which keeps the server's. Plain gradient descent alone.
    """

    name = "scaffold"
    reference = "Karimireddy et al. 2020 (SCAFFOLD), Algorithm 1, option II"
    numerics = "slopes.scaffold"

    optimiser: str = option("sgd", "update rule", choices=("sgd",), aliases=("optimizer",))
    momentum: float = option(0.0, "momentum; the controls allow none", at_least=0, at_most=0)

    def remember(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory with a control of zero ``[P_shared]``."""
        control = problem.initial.new_zeros(problem.layout.shared_total)
        return {**super().remember(problem), "control": control}


@component
class GroupSparse(Written, Map):
    """Train with a group lasso on the outgoing weights of every neuron, and prune by energy."""

    name = "group-sparse"
    reference = "Scardapane et al. 2017, eq. 6"
    numerics = "groups.sparse"

    group_lasso: float = option(1e-4, "strength of the penalty (lambda)", at_least=0)
    energy: float = option(
        0.99, "share of the squared norm that the groups kept must hold", above=0, at_most=1
    )


@component
class GroupSnip(Written, Map):
    """Prune the groups whose connections the loss is least sensitive to, then train.

    Goes with ``--hyper accumulate``: from round 2 on the mask is that of all clients' data; in
    round 1 each client prunes by its own.
    """

    name = "group-snip"
    reference = "Lee, Ajanthan & Torr 2019 (SNIP), eq. 5, over groups of outgoing weights"
    numerics = "groups.snip"

    pruned: float = option(0.5, "share of the groups that is pruned", at_least=0, below=1)


@component
class PersonalBayes(Keeping, ReinforcedVariational):
    """Fit a personal Gaussian around the shared one, which follows it; both cover everything."""

    name = "pfedbayes"
    reference = "Zhang et al. 2022 (pFedBayes), Algorithm 1"

    reinforce_steps: int = option(
        1, "steps of the shared Gaussian on the KL term after each local step", at_least=0
    )

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Take steps of q on NLL + zeta KL(q || w), each followed by one of w on KL(q || w)."""
        from bfl_bpfed.reinforcement import Reinforcement
        from bflcore import Gaussian
        from bflcore.inference.memory import keep_own
        from bflcore.inference.variational import fit_gaussians, prior_of_cohort

        prior = prior_of_cohort(self, problem, broadcast, cohort)
        copy = Reinforcement(self, problem, broadcast, cohort, prior)
        fitted = fit_gaussians(
            self, problem, broadcast, cohort, after_step=copy.follow, anchor=copy.anchor
        )
        own = fitted.posterior.join(Gaussian.unpack(fitted.memory, PERSONAL), problem.layout)
        shared = copy.anchor.split(problem.layout)[0]
        return attrs.evolve(fitted, posterior=shared, memory=keep_own(fitted.memory, own))


@component
class Langevin(Written, GradientInference):
    """Sample the personal part by Langevin dynamics; descend its expected loss in the shared one.

    The personal part's prior is N(m, prior_sigma^2) at every client. Goes with ``--hyper
    accumulate``, which learns m; without, m is 0.
    """

    name = "langevin"
    reference = "Kotelevskii et al. 2022 (FedPop), Algorithm 1 and eq. 5"
    family = "particles"
    numerics = "particles.langevin"

    inner_steps: int = option(10, "Langevin steps a minibatch", at_least=1)
    burn_in: float = option(0.5, "share of them not averaged over", at_least=0, below=1)
    langevin_lr: float = option(0.05, "step of the chain, in the loss per sample", above=0)
    prior_sigma: float = option(0.1, "standard deviation of the common prior", above=0)
    particles: int = option(50, "last states kept, one a minibatch, that predict", at_least=1)

    def initial(self, problem: Problem) -> Posterior:
        """Return the network's random initialisation as one particle."""
        from bfl_baselines.particles import Particles

        return Particles(problem.initial[None])

    def remember(self, problem: Problem) -> dict[str, Tensor]:
        """Return a chain that has not moved ``[S, P_personal]``."""
        memory = super().remember(problem)
        return {name: draws.repeat(self.particles, 1) for name, draws in memory.items()}

    def personalise(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, novel: bool
    ) -> Mapping[str, Tensor]:
        """Let a novel client's chain run as in a round."""
        return self.fit(problem, broadcast, cohort).memory if novel else cohort.memory

    def predict(
        self,
        problem: Problem,
        posterior: Posterior,
        memory: Mapping[str, Tensor],
        x: Tensor,
        streams: list[torch.Generator],
    ) -> Predictive:
        """Average over the particles."""
        from bflcore.inference.memory import join_personal

        whole = join_personal(problem, posterior, memory, len(x))
        return problem.likelihood.predictive(problem.outputs(whole.pack()["draws"], x))


@component
class Pooled(Map):
    """Train on all clients' samples in one place: the bound that federation is measured by.

    Every client gives the same result, so one a round is enough (``--cohort 1``).
    """

    name = "pooled"
    expected_failures = MappingProxyType(
        {"no data gives the prior back": "a client without data trains on the others'"}
    )

    def check(self, problem: Problem) -> None:
        """Refuse personal parts: there is one network."""
        if problem.layout.personal_total:
            raise OptionError(
                "--share: the inference pooled has one network, of which nothing is personal; "
                "allowed: all"
            )

    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Train as one client that holds everything."""
        import torch

        from bflcore.experiments import pretraining
        from bflcore.inference.point import fit_points

        pool = pretraining.pool_samples(problem, 1.0)
        memory = {name: tensor[:1] for name, tensor in cohort.memory.items()}
        everything = pool.cohort([SERVER], memory, broadcast.round)
        result = fit_points(self, pool, broadcast, everything)
        same = result.select([0] * len(cohort.clients))
        return attrs.evolve(same, clients=cohort.clients, examples=torch.tensor(cohort.sizes))
