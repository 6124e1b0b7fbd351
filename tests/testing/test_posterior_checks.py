"""Families with one mistake fail the checks that name it, and no others."""

import attrs
import pytest
import torch

from bflcore.posteriors import DenseGaussian, Gaussian, LowRankGaussian, Point
from bflcore.testing import checks, posterior_checks

from .verdicts import failing, label, reasons, sentences, wrong

TENSORS = attrs.frozen(eq=False)
DENSITIES = "divergence is that of the densities"
NEVER_NEGATIVE = "divergence is never negative"
NATURAL = "natural parameters add up"


def gaussian(mistake, **fields):
    return wrong(Gaussian, mistake, TENSORS, **fields)


def point(mistake, **fields):
    return wrong(Point, mistake, TENSORS, **fields)


def join_end_to_end(self, personal, layout):
    mine, theirs = self.pack(), personal.pack()
    return self.unpack({name: torch.cat([mine[name], theirs[name]], -1) for name in mine})


WRONG = [
    (
        gaussian(
            "Turns the noise into samples in place",
            sample=lambda q, noise: noise.mul_(q.variance.sqrt()).add_(q.mean),
        ),
        {"inputs stay untouched"},
    ),
    (
        gaussian("Packs without the prefix", pack=lambda q, prefix="": Gaussian.pack(q)),
        {"packing inverts"},
    ),
    (gaussian("Joins the halves end to end", join=join_end_to_end), {"splitting inverts"}),
    (
        gaussian(
            "Joins clients in reverse",
            concatenate=classmethod(
                lambda cls, parts: Gaussian.concatenate.__func__(cls, parts[::-1])
            ),
        ),
        {"clients can be selected"},
    ),
    (
        gaussian(
            "Rejects variances above 1",
            invalid=lambda q: (
                Gaussian.invalid(q) or ("wide" if bool((q.variance > 1).any()) else None)
            ),
        ),
        {"valid posteriors are accepted"},
    ),
    (
        gaussian(
            "Looks at variances alone", invalid=lambda q: "negative" * bool((q.variance < 0).any())
        ),
        {"values that are not finite are invalid"},
    ),
    (
        gaussian(
            "Takes infinity for a number",
            invalid=lambda q: "nan" * any(bool(t.isnan().any()) for t in q.pack().values()),
        ),
        {"values that are not finite are invalid"},
    ),
    (
        gaussian("Samples in float64", sample=lambda q, noise: Gaussian.sample(q, noise).double()),
        {"keeps the dtype"},
    ),
    (
        gaussian("Measures in float64", kl=lambda q, p: Gaussian.kl(q, p).double()),
        {"keeps the dtype"},
    ),
    (
        point("Says that every divergence is -1", kl=lambda q, p: Point.kl(q, p) * 0 - 1),
        {NEVER_NEGATIVE},
    ),
    (
        gaussian(
            "Forgets to take a half a coordinate away", kl=lambda q, p: Gaussian.kl(q, p) + 25.5
        ),
        {NEVER_NEGATIVE, DENSITIES},
    ),
    (
        gaussian("Sums divergences over clients", kl=lambda q, p: Gaussian.kl(q, p).sum()),
        {NEVER_NEGATIVE, DENSITIES},
    ),
    (gaussian("Forgets the half", kl=lambda q, p: 2 * Gaussian.kl(q, p)), {DENSITIES}),
    (
        gaussian("Takes the divergence the other way", kl=lambda q, p: Gaussian.kl(p, q)),
        {DENSITIES},
    ),
    (
        gaussian(
            "Takes the root of the density",
            log_density=lambda q, w: Gaussian.log_density(q, w) / 2,
        ),
        {DENSITIES},
    ),
    (
        gaussian(
            "Takes the mean for the shift",
            natural=lambda q: {"precision": 1 / q.variance, "shift": q.mean},
        ),
        {NATURAL},
    ),
    (
        gaussian(
            "Adds variances",
            natural=lambda q: {"variance": q.variance, "mean": q.mean},
            from_natural=classmethod(lambda cls, natural: cls(**natural)),
        ),
        {NATURAL},
    ),
    (
        point("Samples beside the point", sample=lambda q, noise: (q.mean + 1).expand_as(noise)),
        {"samples have the mean"},
    ),
    (
        gaussian(
            "Takes the variance for the standard deviation",
            sample=lambda q, noise: q.mean + q.variance * noise,
        ),
        {"samples have the mean", DENSITIES},
    ),
]


@pytest.mark.parametrize(("family", "expected"), WRONG, ids=label)
def test_a_wrong_family_fails_exactly(family, expected):
    assert failing(family) == expected


@pytest.mark.parametrize("family", [DenseGaussian, Gaussian, LowRankGaussian, Point])
def test_a_right_family_passes(family):
    assert failing(wrong(family, "Nothing", TENSORS)) == set()


def test_every_check_has_a_family_that_fails_it():
    names = sentences(posterior_checks.checks_of(Gaussian))
    assert set().union(*(expected for _, expected in WRONG)) == names


def test_without_a_density_no_density_is_asked():
    assert DENSITIES not in {check.name for check in checks(Point)}


def test_a_name_missing_from_a_pack_is_said_with_its_place():
    (part,) = (family for family, expected in WRONG if expected == {"packing inverts"})
    assert reasons(part)["packing inverts"].startswith(
        "KeyError: 'own.mean' at posteriors/base.py:"
    )
