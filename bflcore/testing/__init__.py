"""Conformance checks for third-party components (see `bflcore.testing.kit`)."""

from bflcore.testing.kit import Check, Outcome, checks, parametrize_with_checks

__all__ = ["Check", "Outcome", "checks", "parametrize_with_checks"]
