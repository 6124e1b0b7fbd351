"""The conformance kit: what every component must do, as a list of plain checks.

    for check in checks(MyInference):
        check.function()                # raises where MyInference is wrong

Neither pytest nor hypothesis is needed. ``bfl check-plugin NAME`` runs the checks of an installed
plugin; `parametrize_with_checks` turns them into tests.

A part that cannot pass a check says so, with the reason, in its `expected_failures`; a check that
passes although its failure is expected is an error, so that reasons do not outlive their cause.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import attrs

from bflcore.errors import BflError
from bflcore.options import Component
from bflcore.options.kinds import KINDS

__all__ = ["Check", "Outcome", "checks", "parametrize_with_checks"]

Part = type[Component]
Function = Callable[[Any], None]


@attrs.frozen
class Outcome:
    """The outcome of a check; `reason` says in one line why it failed or was expected to."""

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
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's part may even exit
            if self.expected:
                return Outcome("expected failure", _line(self.expected))
            return Outcome("failed", _reason(error, self.part))
        if self.expected:
            return Outcome(
                "failed",
                f"passes, but {self.part.__name__}.expected_failures says that it cannot "
                f"({_line(self.expected)}); remove that entry",
            )
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
                f"{part.__name__}.expected_failures names {name!r}, which is not a check of "
                f"{part.kind} {part.name}; checks: {asked}"
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
            id=f"{part.kind}-{part.name}-{check.name.replace(' ', '_')}",
            marks=[pytest.mark.xfail(reason=check.expected, strict=True)] if check.expected else [],
        )
        for part in parts
        for check in checks(part)
    ]
    return pytest.mark.parametrize("check", cases)


def _functions(part: Part) -> Iterator[Function]:
    from bflcore.testing import component_checks

    yield from component_checks.checks_of(part)
    for module in (kind.checks for kind in KINDS if kind.name == part.kind and kind.checks):
        yield from import_module(f"bflcore.testing.{module}").checks_of(part)


def _sentence(function: Function) -> str:
    return function.__name__.replace("_", " ")


def _bound(function: Function, part: Part) -> Callable[[], None]:
    return lambda: function(part)


def _reason(error: BaseException, part: Part) -> str:
    """Return what a failure says: an assertion its own words, anything else also type and place."""
    try:
        text = _line(str(error))
    except Exception:  # noqa: BLE001 - the stranger's exception cannot even be printed
        text = ""
    if text and isinstance(error, AssertionError):
        return text
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return said if isinstance(error, BflError) else said + _place(error, part)


def _place(error: BaseException, part: Part) -> str:
    """Say which line failed: the last one beside the part's own module, otherwise the last."""
    frames = traceback.extract_tb(error.__traceback__)
    module = getattr(sys.modules.get(part.__module__), "__file__", None) or ""
    own = [frame for frame in frames if Path(frame.filename).parent == Path(module).parent]
    return "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in (own or frames)[-1:])


def _line(text: str) -> str:
    return " ".join(text.split())
