"""Sites: each client's own factor of the posterior, so that its data count once.

The posterior is the prior times one factor per client, its *site* (Bui et al. 2018, eq. 3; Ashman
et al. 2022, eq. 5):

    q(w) = p0(w) prod_k t_k(w)

A client keeps its site t_k. It divides what it contributed before out of the posterior q that the
server sends (the *cavity* q / t_k), fits the posterior q_k that its data and the cavity give, and
changes its site and the server's posterior by the same factor:

    change_k = (q_k / q)^damping,    t_k <- t_k change_k,    q <- q prod_k change_k

Data that a client sends again replace what it sent before, and the product holds whoever takes part
in a round. Where clients change at the same time, the means are those of a Jacobi iteration, and
slow. `momentum` adds a share of a client's own last change of the mean to its next one, which for
all clients together is the heavy-ball method (Polyak 1964). Three things make the product hold to
rounding, too:

* The change is that of the posterior as it was sent, rounded to the dtype that travels; the site,
  which stays at the client, is its sum in float64.
* A posterior less precise than its cavity is corrected here, before it is sent: sites then never
  have a negative precision, and q, their product with p0, is proper whoever takes part.
* A client keeps a new site only if its result was accepted, as every memory.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Self, final

import attrs

from bflcore.inference.base import LocalInference
from bflcore.inference.memory import Memory, local_result
from bflcore.lazy import lazy
from bflcore.messages import REPORTED, within
from bflcore.posteriors import ExponentialFamily, Posterior

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.messages import Broadcast, Cohort, LocalResult
    from bflcore.problem import Problem
else:
    torch = lazy("torch")

__all__ = ["CORRECTED", "Natural", "SiteInference", "SiteMemory", "exact_natural"]

Natural = dict[str, "Tensor"]

# Units of rounding of the largest natural parameter: a smaller change is none.
SETTLED = 64.0
CORRECTED = (
    f"{REPORTED}corrected"  # the statistic: directions in which a cavity or a site was improper
)


@attrs.frozen(eq=False, kw_only=True)
class SiteMemory(Memory):
    """The memory of a client that keeps its own site.

    `site` holds natural parameters in float64, by name: those of one client, or of K ``[K, ...]``.
    Zeros are the site of a client that has not contributed yet.
    """

    site: Mapping[str, Tensor] = attrs.field(factory=dict)
    velocity: Tensor | None = (
        None  # [P], of the last change: precision times what it moved the mean
    )

    def pack(self) -> dict[str, Tensor]:
        """Return the tensors by name; those of the site are called ``site.name``."""
        site = {f"site.{name}": tensor for name, tensor in self.site.items()}
        velocity = {} if self.velocity is None else {"velocity": self.velocity}
        return Memory(personal=self.personal).pack() | site | velocity

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], family: type[Posterior]) -> Self:
        """Rebuild a memory from what `pack` returned."""
        personal = Memory.unpack(tensors, family).personal
        site, velocity = within(tensors, "site."), tensors.get("velocity")
        return cls(personal=personal, site=site, velocity=velocity)

    @classmethod
    def empty(cls, shared: Posterior, personal: Posterior) -> Self:
        """Return the memory of a client that has not contributed to the posterior yet."""
        site = {name: torch.zeros_like(t) for name, t in exact_natural(shared).items()}
        return cls(personal=personal, site=site)


class SiteInference(LocalInference):
    """Base of inferences whose clients keep their own factor of the posterior.

    A subclass states `tilt`; families are `ExponentialFamily`. Personal parameters are the client's
    own: they have the first prior, and no site.
    """

    tags = frozenset({"conserves-evidence"})
    needs = MappingProxyType({"aggregator": "multiplies-changes", "hyper": "carries-posterior"})

    # Subclasses may make options of these two: the share of a change that a client makes, and that
    # of its last change of the mean which it adds.
    damping: float = 1.0
    momentum: float = 0.0
    # Whether only the mean is damped, and not in a client's first reply. Precisions that do not
    # depend on the mean need no damping.
    damps_the_mean_alone: ClassVar[bool] = False

    @abc.abstractmethod
    def tilt(
        self, problem: Problem, broadcast: Broadcast, cohort: Cohort, cavity: Posterior
    ) -> tuple[Posterior, Tensor]:
        """Return each client's posterior ``[K, P]`` and mean loss ``[K]`` in nats per sample.

        `cavity` ``[K, P]`` takes the place of the prior: it is what all other clients know, and
        over personal parameters the first prior.
        """

    def initial_memory(self, problem: Problem) -> dict[str, Tensor]:
        """Return the memory of a client without a site."""
        shared, personal = self.initial(problem).split(problem.layout)
        empty = SiteMemory.empty(shared, personal)
        still = torch.zeros_like(shared.mean).double() if self.momentum else None
        return attrs.evolve(empty, velocity=still).pack()

    @final
    def fit(self, problem: Problem, broadcast: Broadcast, cohort: Cohort) -> LocalResult:
        """Fit every client's posterior against its cavity; send the change and keep the site."""
        prior, before = _exponential(broadcast.prior), exact_natural(broadcast.prior)
        memory = SiteMemory.unpack(cohort.memory, type(prior))
        site = memory.site
        cavity, improper = self._cavity(prior, site)
        posterior, loss = self.tilt(
            problem, broadcast, cohort, self._join(problem, prior.with_natural(cavity))
        )
        tilted = posterior.split(problem.layout)[0]
        after, raised = prior.at_least(exact_natural(tilted), cavity, tilted.mean.double())
        first = _is_empty(site)
        damped = self._damped(prior, before, after, first)
        if memory.velocity is not None:
            damped["shift"] = damped["shift"] + self.momentum * memory.velocity
        changed = _changed(cohort, damped, before, tilted.mean.dtype)
        sent = _where(changed, _like(prior.with_natural(damped), tilted), prior)
        # The change as the server will compute it: of what was sent, rounded as it was sent.
        change = {n: t - before[n] for n, t in exact_natural(sent).items()}
        kept = SiteMemory(
            personal=posterior.split(problem.layout)[1],
            site={name: tensor + change[name] for name, tensor in site.items()},
            velocity=None if memory.velocity is None else _velocity(sent, prior) * ~first[:, None],
        )
        corrected = {CORRECTED: (improper + raised).to(loss.dtype)}
        result = local_result(problem, cohort, posterior, loss, corrected, kept)
        return attrs.evolve(result, posterior=sent)

    def _damped(
        self, prior: ExponentialFamily, before: Natural, after: Natural, first: Tensor
    ) -> Natural:
        """Return what a client changes the posterior to ``[K, ...]``, before any momentum.

        `first` ``[K]`` says whose first reply it is.
        """
        if self.damps_the_mean_alone:
            resting = _around(prior.with_natural(after), prior.mean)
            share = torch.where(first, 1.0, self.damping).double().unsqueeze(-1)
            return {**after, "shift": torch.lerp(resting, after["shift"], share)}
        return {n: before[n] + self.damping * (t - before[n]) for n, t in after.items()}

    def _cavity(
        self, prior: ExponentialFamily, site: Mapping[str, Tensor]
    ) -> tuple[Natural, Tensor]:
        """Return q / t_k ``[K, ...]``, and in how many directions it was improper ``[K]``.

        It holds p0, so only rounding makes it improper: where one client's data outweigh p0 by
        more than the digits of the dtype that travels.
        """
        before = exact_natural(prior)
        cavity = {name: before[name] - tensor for name, tensor in site.items()}
        least = 4 * torch.finfo(prior.mean.dtype).eps
        bound = {name: (least * t).expand_as(cavity[name]) for name, t in before.items()}
        mean = prior.mean.double().expand(len(next(iter(cavity.values()))), -1)
        return prior.at_least(cavity, bound, mean)

    def _join(self, problem: Problem, cavity: Posterior) -> Posterior:
        """Return the cavity ``[K, P]`` over all parameters, in the dtype of the problem."""
        first = self.prior(problem)
        shared = _like(cavity, first)
        if not problem.layout.personal_total:
            return shared
        personal, clients = first.split(problem.layout)[1], len(shared.mean)
        return shared.join(personal.map(lambda t: t.expand(clients, *t.shape)), problem.layout)


def exact_natural(posterior: Posterior) -> Natural:
    """Return the natural parameters ``[..., P]`` or ``[..., P, P]`` in float64."""
    assert isinstance(posterior, ExponentialFamily), "a site needs natural parameters"  # noqa: S101
    return posterior.map(lambda t: t.double() if t.is_floating_point() else t).natural()


def _is_empty(site: Mapping[str, Tensor]) -> Tensor:
    """Return which clients ``[K]`` have not contributed yet."""
    found = [~tensor.flatten(1).any(1) for tensor in site.values()]
    return torch.stack(found).all(0)


def _around(posterior: Posterior, mean: Tensor) -> Tensor:
    """Return the shift ``[K, P]`` that the posteriors would have with another `mean` ``[P]``."""
    fields = posterior.pack()
    moved = posterior.unpack(
        fields | {"mean": mean.to(fields["mean"].dtype).expand_as(fields["mean"])}
    )
    return exact_natural(moved)["shift"]


def _velocity(sent: Posterior, prior: Posterior) -> Tensor:
    """Return precision times the change of the mean ``[K, P]``."""
    return exact_natural(sent)["shift"] - _around(sent, prior.mean)


def _exponential(posterior: Posterior) -> ExponentialFamily:
    assert isinstance(posterior, ExponentialFamily), "a site needs natural parameters"  # noqa: S101
    return posterior


def _like(posterior: Posterior, other: Posterior) -> Posterior:
    """Return the posterior in the dtypes of another."""
    wanted = other.pack()
    return posterior.unpack({n: t.to(wanted[n].dtype) for n, t in posterior.pack().items()})


def _changed(cohort: Cohort, after: Natural, before: Natural, dtype: torch.dtype) -> Tensor:
    """Return which clients ``[K]`` change the posterior by more than rounding.

    Others, and those without samples, send it as it was: rounding errors of many rounds would add
    up to a random walk.
    """
    changed = torch.tensor(cohort.sizes, device=cohort.x.device) < 0
    for name, natural in after.items():
        if not natural[0].numel():  # nothing is shared
            continue
        apart = (natural - before[name]).abs().flatten(1).amax(1)
        changed |= apart > SETTLED * torch.finfo(dtype).eps * before[name].abs().max()
    return changed & (torch.tensor(cohort.sizes, device=cohort.x.device) > 0)


def _where(chosen: Tensor, posterior: Posterior, prior: Posterior) -> Posterior:
    """Return the posteriors ``[K, P]`` of chosen clients, and the prior for the others."""
    if bool(chosen.all()):
        return posterior
    fields = prior.pack()
    return posterior.unpack(
        {
            name: torch.where(chosen.view(-1, *[1] * (t.ndim - 1)), t, fields[name])
            for name, t in posterior.pack().items()
        }
    )
