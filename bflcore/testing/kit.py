"""The conformance kit: the requirements on components, as a list of plain checks.

    for check in checks(MyInference):
        check.function()                # raises if MyInference is wrong

Neither pytest nor hypothesis is needed. ``bfl check-plugin NAME`` runs the checks of an installed
plugin; `parametrize_with_checks` turns them into tests.

A part that cannot pass a check declares this, with the reason, in its `expected_failures`; it is an
error if such a check passes, so that the entry is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, Literal

import attrs

from bflcore.errors import BflError, described
from bflcore.options import Component
from bflcore.options.kinds import KINDS

__all__ = ["Check", "Outcome", "checks", "parametrize_with_checks"]

Part = type[Component]
Function = Callable[[Any], None]


@attrs.frozen
class Outcome:
    """The outcome of a check; `reason` is one line on why it failed or was expected to fail."""

    state: Literal["ok", "failed", "expected failure"]
    reason: str = ""


@attrs.frozen
class Check:
    """One check of one part; `name` is a sentence, `expected` why it may fail (or empty)."""

    part: Part
    name: str
    function: Callable[[], None]
    expected: str = ""

    def outcome(self) -> Outcome:
        """Run the check; any exception counts as a failure of the part."""
        try:
            self.function()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the part may even exit
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

    Raises `ValueError` if `expected_failures` names a check that does not exist for `part`.
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
    """Return the check of a part; global settings that the part changes are restored after it."""

    def check() -> None:
        from bflcore.testing.surroundings import restored

        with restored():
            function(part)

    return check


def _reason(error: BaseException, part: Part) -> str:
    """Return the message of a failure; unless it is meant for users, also its type and place."""
    text = ""
    if isinstance(error, AssertionError | BflError):
        text = _line(str(error))
    if text and isinstance(error, BflError):
        return f"{type(error).__name__}: {text}"
    return text or described(error, part)


def _line(text: str) -> str:
    return " ".join(text.split())
