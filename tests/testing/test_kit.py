"""The kit itself: what it lists, how it reports, and that every installed part passes."""

import re
import subprocess
import sys

import pytest

from bflcore import Fixed
from bflcore.options.kinds import KINDS
from bflcore.registry.loading import load_registry
from bflcore.testing import Check, Outcome, checks, parametrize_with_checks

from .verdicts import wrong

pytest_plugins = ["pytester"]

HERE = ("bflcore", "bfl-aggregators", "bfl-bpfed")  # other plugins run their own checks
COUNTED = "rounds are counted"
ONE_LINE = "it never did and it never will"


def installed():
    registry = load_registry()
    for distribution in registry.plugins:
        if distribution.name in HERE:
            yield from (registry.of(kind)[name] for kind, name in distribution.components)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(
            check,
            id=f"{part.kind}-{part.name}-{check.name}",
            marks=pytest.mark.xfail(reason=check.expected, strict=True) if check.expected else (),
        )
        for part in installed()
        for check in checks(part)
    ],
)
def test_every_part_of_the_core_and_its_first_plugins_conforms(check):
    check.function()


def test_there_are_parts_of_every_kind_that_is_checked():
    assert {part.kind for part in installed()} >= {kind.name for kind in KINDS if kind.checks}


def check(function, expected="", part=Fixed):
    return Check(part, "does what it should", function, expected)


def failing_with(error):
    def function():
        raise error

    return function


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AssertionError("two\n   lines"), "two lines"),
        (ValueError("two\nlines"), "ValueError: two lines at testing/test_kit.py:"),
        (AssertionError(), "AssertionError at testing/test_kit.py:"),
        (KeyError("mean"), "KeyError: 'mean' at testing/test_kit.py:"),
        (SystemExit(0), "SystemExit: 0 at testing/test_kit.py:"),
        (UnprintableError(), "UnprintableError at testing/test_kit.py:"),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_a_failure_is_one_line_with_the_place_where_it_is_no_assertion(error, reason):
    outcome = check(failing_with(error)).outcome()
    assert outcome.state == "failed"
    assert outcome.reason.startswith(reason)
    assert "\n" not in outcome.reason


def test_the_place_is_in_the_authors_own_code_and_not_in_the_core_or_a_library():
    from bflcore.options import build

    outcome = check(lambda: build(Fixed, None, "hyper"), part=Fixed).outcome()
    assert re.fullmatch("AttributeError: .* at testing/test_kit.py:[0-9]+", outcome.reason)


def test_an_interrupt_is_nobodys_failure():
    with pytest.raises(KeyboardInterrupt):
        check(failing_with(KeyboardInterrupt())).outcome()


def test_a_check_that_passes_is_ok_and_has_no_reason():
    assert check(lambda: None).outcome() == Outcome("ok")


def test_an_expected_failure_gives_its_reason_in_one_line():
    outcome = check(failing_with(ValueError("no")), "it never\ndid").outcome()
    assert outcome == Outcome("expected failure", "it never did")


def test_an_expected_failure_that_passes_is_a_failure_that_says_what_to_remove():
    outcome = check(lambda: None, "it never\ndid").outcome()
    assert outcome.state == "failed"
    assert outcome.reason == (
        "passes, but Fixed.expected_failures says that it cannot (it never did); remove that entry"
    )


def test_a_part_carries_the_reasons_that_it_declares():
    part = wrong(Fixed, "Nothing", expected_failures={COUNTED: ONE_LINE})
    expected = {check.name: check.expected for check in checks(part)}
    assert expected.pop(COUNTED) == ONE_LINE
    assert not any(expected.values())


def test_expecting_a_failure_of_no_check_is_an_error_that_lists_the_checks():
    part = wrong(Fixed, "Nothing", expected_failures={"rounds are cuonted": ONE_LINE})
    names = [check.name for check in checks(Fixed)]
    with pytest.raises(ValueError, match="which is not a check of hyper wrong") as error:
        list(checks(part))
    assert "Wrong.expected_failures names 'rounds are cuonted'" in str(error.value)
    assert str(error.value).endswith("; ".join(names))
    with pytest.raises(ValueError, match="which is not a check of hyper wrong"):
        parametrize_with_checks([part])


def test_names_are_sentences_and_the_ids_of_tests_name_kind_part_and_check():
    cases = parametrize_with_checks([Fixed]).args[1]
    ids = [case.id for case in cases]
    assert ids[0] == "hyper-fixed-is_frozen"
    assert len(set(ids)) == len(ids)
    assert all(
        check.name == check.name.lower() and "_" not in check.name for check in checks(Fixed)
    )


PARTS = '''
from bflcore.options import Component


class Right(Component):
    """Do a thing."""

    kind = "logger"
    name = "right"


class Wrong(Right):
    """Do a thing"""

    name = "wrong"


class Known(Right):
    """Do a thing"""

    name = "known"
    expected_failures = {"is documented": "it does not end"}


class Repaired(Right):
    """Do a thing."""

    name = "repaired"
    expected_failures = {"is documented": "it did not end"}
'''

SUITE = """
from documented import Known, Repaired, Right, Wrong
from bflcore.testing import parametrize_with_checks


@parametrize_with_checks([Right, Wrong, Known, Repaired])
def test_conformance(check):
    check.function()
"""


def test_under_pytest_expected_failures_are_strict(pytester):
    pytester.makepyfile(documented=PARTS, test_suite=SUITE)
    pytester.syspathinsert()
    result = pytester.runpytest_subprocess("-rxfE")
    result.assert_outcomes(passed=4 * 4 - 3, failed=2, xfailed=1)
    result.stdout.fnmatch_lines_random(
        [
            "XFAIL *[[]logger-known-is_documented[]] - it does not end",
            "E *AssertionError: the docstring's first line must be a sentence*",
            "FAILED *[[]logger-wrong-is_documented[]]*",
            "FAILED *[[]logger-repaired-is_documented[]]*",
            "*XPASS(strict)* it did not end",
        ]
    )


CORE = """
import sys
from bflcore.registry import builtin
from bflcore.registry.loading import read_plugins
from bflcore.testing import checks

registry = read_plugins(builtin)
core = registry.plugins[0]
parts = {kind: registry.of(kind)[name] for kind, name in core.components if kind != "engine"}
for part in parts.values():  # one of each kind; an engine's workers are processes of their own
    assert "ok" in [check.outcome().state for check in checks(part)]
assert len(parts) > 8
print(*[name for name in ("pytest", "_pytest", "hypothesis") if name in sys.modules])
"""


def test_checking_the_core_imports_neither_pytest_nor_hypothesis():
    found = subprocess.run(
        [sys.executable, "-c", CORE], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout.strip()) == (0, ""), found.stderr


def test_importing_the_kit_imports_no_torch():
    code = "import bflcore.testing, sys; print(any(n in sys.modules for n in ('torch', 'pytest')))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == "False", found.stderr
