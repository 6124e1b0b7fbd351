"""The conformance kit: what every part must do, as a list of plain checks.

    for check in checks(MyInference):
        check.function()                # raises where MyInference is wrong

Neither pytest nor hypothesis is needed. ``bfl check-plugin NAME`` runs the checks of an installed
plugin; `parametrize_with_checks` turns them into tests.

A part that cannot pass a check says so, with the reason, in its `expected_failures`; a check that
passes although its failure is expected is an error, so that reasons do not outlive their cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, Literal

import attrs

from bflcore.options import Component

__all__ = ["Check", "Outcome", "checks", "parametrize_with_checks"]

Part = type[Component]
Function = Callable[[Any], None]

# Kind -> the module whose `checks_of(part)` yields what is asked of that kind beyond every part.
MODULES = {
    "posterior": "posterior_checks",
    "inference": "inference_checks",
    "aggregator": "aggregator_checks",
    "weighting": "weighting_checks",
    "hyper": "hyper_checks",
    "engine": "engine_checks",
    "method": "method_checks",
    "model": "model_checks",
    "partition": "partition_checks",
}


@attrs.frozen
class Outcome:
    """What came of a check; `reason` says why it failed, or was expected to."""

    state: Literal["ok", "failed", "expected failure"]
    reason: str = ""


@attrs.frozen
class Check:
    """One check of one part; `name` is a sentence, `expected` the reason why it may fail."""

    part: Part
    name: str
    function: Callable[[], None]
    expected: str = ""

    def outcome(self) -> Outcome:
        """Run the check; whatever it raises is the part's failure."""
        try:
            self.function()
        except Exception as error:  # noqa: BLE001 - a stranger's part may raise anything
            if self.expected:
                return Outcome("expected failure", self.expected)
            text = " ".join(str(error).split())
            known = isinstance(error, AssertionError) and text
            return Outcome("failed", text if known else f"{type(error).__name__}: {text}")
        if self.expected:
            return Outcome("failed", f"passes, but was expected to fail: {self.expected}")
        return Outcome("ok")


def checks(part: Part) -> Iterator[Check]:
    """Yield every check that `part` must pass, those of all kinds first.

    Raises `ValueError` if `part` expects a check to fail that is not asked of it.
    """
    found = {_sentence(function): function for function in _functions(part)}
    for name in part.expected_failures:
        if name not in found:
            asked = "; ".join(found)
            raise ValueError(
                f"{part.kind} {part.name} expects {name!r} to fail, which is no check of it; "
                f"checks: {asked}"
            )
    for name, function in found.items():
        yield Check(part, name, _bound(function, part), part.expected_failures.get(name, ""))


def parametrize_with_checks(parts: Iterable[Part]) -> Any:
    """Return a decorator that runs a test with every check of every part.

        @parametrize_with_checks([MyInference, MyMethod])
        def test_conformance(check):
            check.function()

    Expected failures are marked as such, strictly. Needs pytest.
    """
    import pytest

    cases = [
        pytest.param(
            check,
            id=f"{part.name}-{check.name.replace(' ', '_')}",
            marks=[pytest.mark.xfail(reason=check.expected, strict=True)] if check.expected else [],
        )
        for part in parts
        for check in checks(part)
    ]
    return pytest.mark.parametrize("check", cases)


def _functions(part: Part) -> Iterator[Function]:
    from bflcore.testing import component_checks

    yield from component_checks.checks_of(part)
    if part.kind in MODULES:
        yield from import_module(f"bflcore.testing.{MODULES[part.kind]}").checks_of(part)


def _sentence(function: Function) -> str:
    return function.__name__.replace("_", " ")


def _bound(function: Function, part: Part) -> Callable[[], None]:
    return lambda: function(part)
