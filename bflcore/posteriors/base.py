"""The base classes of posterior families.

A posterior is a frozen class of tensors whose last axis is the parameters ``P`` and whose leading
axis, where present, is the client ``K``; a matrix between parameters has two axes ``P``. Variances
or precisions are stored and sent, never standard deviations.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import attrs

from bflcore.lazy import lazy
from bflcore.options import Component

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.layout import Layout
else:
    torch = lazy("torch")

__all__ = ["ExponentialFamily", "Posterior", "standard_normal"]

ROUNDING = 1e-6  # relative differences of precisions below it are taken for rounding in float32


class Posterior(Component, abc.ABC):
    """Base of posterior families.

    The law of packing: ``type(q).unpack(q.pack()) == q``.
    """

    kind: ClassVar[str] = "posterior"
    # Fields that describe the network's structure and not a parameter: they are equal at every
    # client and in the prior, and fusion does not change them.
    structure: ClassVar[tuple[str, ...]] = ()
    # Fields that are symmetric matrices, by default ``[..., P, P]`` and positive definite.
    matrices: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:  # every family has a mean, as a field or as a property

        @property
        def mean(self) -> Tensor:
            """Posterior mean ``[..., P]``."""

    def pack(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors ``[..., P]`` by field name, each with `prefix`."""
        return {prefix + name: getattr(self, name) for name in self._fields()}

    def without_structure(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors ``[..., P]`` that a client sends: the server has the structure."""
        return {prefix + n: t for n, t in self.pack().items() if n not in self.structure}

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], prefix: str = "") -> Self:
        """Rebuild a posterior from the tensors ``[..., P]`` that `pack` returned."""
        return cls(**{name: tensors[prefix + name] for name in cls._fields()})

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply `function` to every tensor ``[..., P]``."""
        return self.unpack({name: function(tensor) for name, tensor in self.pack().items()})

    def __getitem__(self, clients: Any) -> Self:
        """Select along the client axis."""
        return self.map(lambda tensor: tensor[clients])

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Join posteriors along the client axis they already have."""
        packed = [part.pack() for part in parts]
        return cls.unpack({name: torch.cat([p[name] for p in packed]) for name in packed[0]})

    def split(self, layout: Layout) -> tuple[Self, Self]:
        """Divide into the posterior over shared and the one over personal coordinates.

        Of a matrix the two diagonal blocks are kept: ``join(*split(q)) == q`` where shared and
        personal coordinates are independent.
        """
        pairs = {name: self._split(name, layout) for name in self._fields()}
        shared, personal = ({name: pair[half] for name, pair in pairs.items()} for half in (0, 1))
        return self.unpack(shared), self.unpack(personal)

    def join(self, personal: Self, layout: Layout) -> Self:
        """Put the shared coordinates (`self`) and the personal ones back together."""
        mine, theirs = self.pack(), personal.pack()
        return self.unpack({n: self._join(n, mine[n], theirs[n], layout) for n in mine})

    def variances(self) -> dict[str, Tensor]:
        """Return variances ``[..., P]`` by name that cost no more than a pass; 0 is certainty.

        Clients are compared by them (`bflcore.engines.trust`). By default the fields whose names
        end in "variance".
        """
        return {name: t for name, t in self.pack().items() if name.endswith("variance")}

    def marginals(self) -> dict[str, Tensor]:
        """Return what is known of each parameter alone, ``[..., P]`` by name, the mean among it."""
        fields = {name: t for name, t in self.pack().items() if name not in self.matrices}
        return {"mean": self.mean, **fields}

    def invalid(self) -> str | None:
        """Return why these tensors are not a posterior of the family; None if they are.

        Called on one client's posterior ``[P]`` before it may touch the server.
        """
        for name, tensor in self.pack().items():
            if not bool(tensor.isfinite().all()):
                return f"{name} is not finite"
        return None

    @classmethod
    def arbitrary(cls, layout: Layout, clients: int, noise: torch.Generator) -> Self:
        """Return valid posteriors ``[clients, P]`` in float64 that differ in every field.

        The conformance kit tests families with these. By default every field is standard normal.
        """
        size = (clients, layout.total)
        return cls.unpack({name: standard_normal(size, noise) for name in cls._fields()})

    def combinations(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the means and variances ``[M]`` of linear combinations of the parameters.

        `matrix` ``[M, P]``; of one posterior ``[P]``. The default, None, is for families that do
        not say how uncertain a parameter is.
        """
        return matrix @ self.mean, None

    def log_density(self, parameters: Tensor) -> Tensor:
        """Return log q(parameters) in nats ``[...]``; families without a density have none."""
        raise NotImplementedError(f"{self.name} has no density")

    @abc.abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """Return parameters ``[..., P]`` for standard normal `noise` ``[..., P]``."""

    @abc.abstractmethod
    def kl(self, other: Self) -> Tensor:
        """Return KL(self || other) in nats, summed over parameters: ``[...]``."""

    def _split(self, name: str, layout: Layout) -> tuple[Tensor, Tensor]:
        shared, personal = layout.split(getattr(self, name))
        if name in self.matrices:
            return layout.split(shared.mT)[0].mT, layout.split(personal.mT)[1].mT
        return shared, personal

    def _join(self, name: str, shared: Tensor, personal: Tensor, layout: Layout) -> Tensor:
        if name not in self.matrices:
            return layout.join(shared, personal)
        across = shared.new_zeros(*shared.shape[:-1], layout.personal_total)
        back = personal.new_zeros(*personal.shape[:-1], layout.shared_total)
        rows = layout.join(shared, across), layout.join(back, personal)
        return layout.join(rows[0].mT, rows[1].mT).mT

    @classmethod
    def _fields(cls) -> tuple[str, ...]:
        return tuple(field.name for field in attrs.fields(cast("Any", cls)))


class ExponentialFamily(Posterior):
    """Base of families whose densities multiply by adding natural parameters.

    The laws: ``from_natural(q.natural()) == q``, and the log density of a product is, up to a
    constant, that of the sum of the factors' natural parameters. A difference of natural parameters
    is a *factor*, which need not be a posterior: its precision may be zero or negative.
    """

    @abc.abstractmethod
    def natural(self) -> dict[str, Tensor]:
        """Return the natural parameters by name, each ``[..., P]`` or a matrix."""

    @classmethod
    @abc.abstractmethod
    def from_natural(cls, natural: Mapping[str, Tensor]) -> Self:
        """Return the posterior ``[..., P]`` with these natural parameters."""

    def with_natural(self, natural: Mapping[str, Tensor]) -> Self:
        """Return the posterior ``[..., P]`` with these natural parameters and the same structure.

        A family whose natural parameters mean something only beside its structure overrides it.
        """
        return self.from_natural(natural)

    def at_least(
        self, factor: Mapping[str, Tensor], least: Mapping[str, Tensor], mean: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return `factor` no less precise than `least`, and in how many directions it was ``[K]``.

        Both are natural parameters ``[K, ...]``; where the precision is raised to that of `least`,
        the factor's mean becomes `mean` ``[K, P]``. A precision that is less by a relative
        `ROUNDING` stays. Here for families whose natural parameters are a `precision`
        ``[K, P]`` or ``[K, P, P]`` and a `shift` ``[K, P]``, precision times mean; others override
        it.
        """
        precision, shift, bound = factor["precision"], factor["shift"], least["precision"]
        if precision.ndim == shift.ndim:
            low = precision < bound * (1 - ROUNDING)
            raised = {
                "precision": torch.where(low, bound, precision),
                "shift": torch.where(low, bound * mean, shift),
            }
            return raised, low.sum(-1)
        low = torch.linalg.cholesky_ex(precision - bound * (1 - ROUNDING)).info > 0
        count = low.new_zeros(low.shape, dtype=torch.int64)
        precision, shift = precision.clone(), shift.clone()
        for row in low.nonzero().flatten().tolist():  # rare, and dear: one client at a time
            values, vectors = torch.linalg.eigh(precision[row] - bound[row])
            precision[row] = bound[row] + (vectors * values.clamp_min(0)) @ vectors.mT
            shift[row] = precision[row] @ mean[row]
            count[row] = (values < 0).sum()
        return {"precision": precision, "shift": shift}, count


def standard_normal(size: tuple[int, ...], noise: torch.Generator) -> Tensor:
    """Return standard normal numbers ``[*size]`` in float64, for `Posterior.arbitrary`."""
    return torch.randn(size, generator=noise, dtype=torch.float64)
