"""Checks of posterior families. They use `arbitrary`, and `log_density` if it is defined."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bflcore.posteriors import ExponentialFamily, Posterior
from bflcore.testing import problems

__all__ = ["checks_of"]

Family = type[Posterior]

DRAWS = 20_000
ERRORS = 6.0  # tolerance in standard errors; the draws are fixed, so results never vary


def checks_of(family: Family) -> Iterator[Callable[[Family], None]]:
    """Yield the checks of a posterior family."""
    yield inputs_stay_untouched
    yield from (packing_inverts, splitting_inverts, clients_can_be_selected)
    yield from (valid_posteriors_are_accepted, values_that_are_not_finite_are_invalid)
    yield from (keeps_the_dtype, divergence_is_never_negative, samples_have_the_mean)
    if family.log_density is not Posterior.log_density:
        yield divergence_is_that_of_the_densities
        if issubclass(family, ExponentialFamily):
            yield natural_parameters_add_up


def inputs_stay_untouched(family: Family) -> None:
    """Sampling, splitting and comparing leave a posterior as it was."""
    of = problems.separable(sharing="body")
    q, p = _pair(family)
    noise = torch.randn(3, of.layout.total, generator=problems.generator(), dtype=torch.float64)
    before = problems.copies(q, p, {"noise": noise})
    q.sample(noise)
    q.kl(p)
    q.split(of.layout)
    q.invalid()
    for thing, copy in zip((q, p, {"noise": noise}), before, strict=True):
        problems.assert_same(thing, copy, "an input was changed in place", 0.0)


def packing_inverts(family: Family) -> None:
    """``unpack(pack()) == q``, under any prefix."""
    q, _ = _pair(family)
    problems.assert_same(family.unpack(q.pack("own."), "own."), q, "pack and unpack", 0.0)


def splitting_inverts(family: Family) -> None:
    """``join(*split(q)) == q``, whatever is shared."""
    for sharing in ("all", "body", "head", "none"):
        layout = problems.separable(sharing=sharing).layout
        q = family.arbitrary(layout, 3, problems.generator())
        shared, personal = q.split(layout)
        problems.assert_same(
            shared.join(personal, layout), q, f"split and join, sharing {sharing}", 0.0
        )


def clients_can_be_selected(family: Family) -> None:
    """Rows can be taken and put together again."""
    q, _ = _pair(family)
    problems.assert_same(family.concatenate([q[[0]], q[[1, 2]]]), q, "concatenate", 0.0)


def valid_posteriors_are_accepted(family: Family) -> None:
    """`arbitrary` returns valid posteriors."""
    q, _ = _pair(family)
    if reason := q[0].invalid():
        raise AssertionError(f"invalid() rejects a valid posterior: {reason}")


def values_that_are_not_finite_are_invalid(family: Family) -> None:
    """NaN or infinity in any field makes a posterior invalid."""
    packed = _pair(family)[0][0].pack()
    for name, tensor in packed.items():
        for value in ("nan", "inf"):
            broken = tensor.clone().flatten()
            broken[0] = float(value)
            if not family.unpack(packed | {name: broken.view_as(tensor)}).invalid():
                raise AssertionError(
                    f"invalid() does not notice {value} in {name}; begin with super().invalid()"
                )


def keeps_the_dtype(family: Family) -> None:
    """Samples and divergences have the dtype of the posterior."""
    q, p = (one.map(torch.Tensor.float) for one in _pair(family))
    noise = torch.randn(3, q.mean.shape[-1], generator=problems.generator())
    for name, result in (("sample", q.sample(noise)), ("kl", q.kl(p)), ("mean", q.mean)):
        if result.dtype != torch.float32:
            raise AssertionError(
                f"{name} of a float32 posterior is {result.dtype}; compute in its own dtype"
            )


def divergence_is_never_negative(family: Family) -> None:
    """``q.kl(p) >= 0`` and ``q.kl(q) == 0``, with one number per client."""
    q, p = _pair(family)
    apart, none = q.kl(p), q.kl(q)
    if apart.shape != (3,):
        raise AssertionError(f"kl of 3 clients has shape {tuple(apart.shape)}, not (3,)")
    if not bool((apart >= 0).all()):
        raise AssertionError(f"KL(q || p) of 3 clients is {apart.tolist()}, not all >= 0")
    if not bool((none.abs() <= 1e-9).all()):
        raise AssertionError(f"KL(q || q) of 3 clients is {none.tolist()}, not 0")


def samples_have_the_mean(family: Family) -> None:
    """The average of many samples is the mean, and their spread the variance, if it has one."""
    q = _pair(family)[0][[0]]
    draws = _samples(q)
    error = ERRORS * draws.std(0) / DRAWS**0.5 + 1e-9
    _within(draws.mean(0) - q.mean[0], error, "mean of samples")
    variance = q.marginals().get("variance")
    if variance is not None and variance.shape == q.mean.shape:
        squares = (draws - q.mean[0]).square()
        error = ERRORS * squares.std(0) / DRAWS**0.5 + 1e-9
        _within(squares.mean(0) - variance[0], error, "variance of samples")


def divergence_is_that_of_the_densities(family: Family) -> None:
    """KL(q || p) is the mean of log q - log p over samples from q."""
    q, p = (one[[0]] for one in _pair(family))
    draws = _samples(q)
    gap = _expand(q, DRAWS).log_density(draws) - _expand(p, DRAWS).log_density(draws)
    error = ERRORS * gap.std() / DRAWS**0.5 + 1e-9
    _within(
        gap.mean() - q.kl(p)[0], error, "mean of log q - log p over samples from q, against q.kl(p)"
    )


def natural_parameters_add_up(family: Family) -> None:
    """``q.with_natural(q.natural()) == q``; sums of natural parameters are products of densities.

    The log density of the product is the sum of the factors', up to a constant.
    """
    q, p = _pair(family)
    assert isinstance(q, ExponentialFamily)  # noqa: S101 - for the type checker
    assert isinstance(p, ExponentialFamily)  # noqa: S101
    mine, theirs = q.natural(), p.natural()
    problems.assert_same(q.with_natural(mine), q, "natural and with_natural", 1e-9)
    product = q.with_natural({name: tensor + theirs[name] for name, tensor in mine.items()})
    draws = _samples(q[[0]])[:10]
    densities = [_expand(one[[0]], len(draws)).log_density(draws) for one in (product, q, p)]
    gap = densities[0] - densities[1] - densities[2]
    if not bool((gap - gap[0]).abs().max() <= 1e-6 * (1 + densities[0].abs().max())):
        raise AssertionError(
            "the density of a sum of natural parameters is not the product of the factors'"
        )


def _expand(posterior: Posterior, draws: int) -> Posterior:
    return posterior.map(lambda tensor: tensor.expand(draws, *tensor.shape[1:]))


def _pair(family: Family) -> tuple[Posterior, Posterior]:
    layout = problems.separable().layout
    return tuple(family.arbitrary(layout, 3, problems.generator(seed)) for seed in (0, 1))  # type: ignore[return-value]


def _samples(q: Posterior) -> torch.Tensor:
    noise = torch.randn(
        DRAWS, q.mean.shape[-1], generator=problems.generator(7), dtype=torch.float64
    )
    return _expand(q, DRAWS).sample(noise)


def _within(difference: torch.Tensor, allowed: torch.Tensor, what: str) -> None:
    excess = (difference.abs() - allowed).nan_to_num(nan=torch.inf)
    if not bool((excess <= 0).all()):
        off = float(difference.flatten()[excess.argmax()])
        raise AssertionError(f"{what}: off by {off:.3g}, more than sampling error explains")
