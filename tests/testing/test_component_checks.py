"""Components with one mistake fail the checks that name it, and no others."""

import attrs
import pytest

from bflcore import Examples, component, option
from bflcore.options import Component
from bflcore.testing import checks, component_checks

from .verdicts import TORCH, failing, label, reasons, sentences, wrong

FROZEN = "is frozen"
NAMED = "is named"
DOCUMENTED = "is documented"
EXPLAINS = "explains its options"
STORED = "options survive storage"
TYPED = "options can be typed"


class Thing(Component):
    """Base of a kind of which nothing more is asked."""

    kind = "logger"
    name = "thing"


def undecorated(cls):
    return cls


def thing(mistake, decorate=component, base=Thing, **fields):
    return wrong(base, mistake, decorate, **fields)


def options(mistake, decorate=component, **annotations):
    """Return a thing with options, each given as its type and what stands behind the ``=``."""
    types = {name: kind for name, (kind, _) in annotations.items()}
    values = {name: value for name, (_, value) in annotations.items()}
    return wrong(Thing, mistake, decorate, __annotations__=types, **values)


def mutable(cls):
    return attrs.define(kw_only=True)(cls)


WRONG = [
    (options("Can be assigned", mutable, pace=(float, option(1.0, "pace"))), {FROZEN}),
    (options("Can be assigned in bounds", mutable, n=(int, option(1, "n", at_least=1))), {FROZEN}),
    (options("Forgets the decorator", undecorated, pace=(float, option(1.0, "pace"))), {FROZEN}),
    (
        wrong(
            options("Has an option", pace=(float, option(1.0, "pace"))),
            "Forgets the decorator of a subclass",
            undecorated,
            __annotations__={"depth": int},
            depth=option(1, "depth"),
        ),
        {FROZEN},
    ),
    (thing("Has an underscore in its name", name="my_thing"), {NAMED}),
    (thing("Has capitals in an alias", aliases=("FedX",)), {NAMED}),
    (thing("Ends in a hyphen", name="thing-"), {NAMED}),
    (thing("Has no docstring", __doc__=None), {DOCUMENTED}),
    (thing("Has an empty docstring", __doc__="  "), {DOCUMENTED}),
    (thing("Ends its first line in the middle", __doc__="Do a thing and\nanother."), {DOCUMENTED}),
    (thing("Cites nothing", base=Examples, reference=""), {DOCUMENTED}),
    (options("Explains nothing", pace=(float, option(1.0, " "))), {EXPLAINS}),
    (options("Has a field that is no option", pace=(float, 1.0)), {EXPLAINS}),
    (
        options("Has a field beside its option", n=(int, option(1, "n")), pace=(float, 1.0)),
        {EXPLAINS},
    ),
    (
        options("Is never equal", attrs.frozen(kw_only=True, eq=False), n=(int, option(1, "n"))),
        {STORED},
    ),
    (options("Refuses its default", n=(int, option(0, "n", at_least=1))), {STORED}),
    (options("Has a default of another type", n=(int, option(1.5, "n"))), {STORED, TYPED}),
    (options("Has None for a number", n=(int, option(None, "n"))), {TYPED}),
    (
        options("Has a comma in an element", names=(tuple[str, ...], option(("a,b",), "names"))),
        {TYPED},
    ),
    (options("Calls a string none", path=(str | None, option("none", "path"))), {TYPED}),
]


@pytest.mark.parametrize(("part", "expected"), WRONG, ids=label)
def test_a_wrong_component_fails_exactly(part, expected):
    assert failing(part) == expected


RIGHT = options(
    "Nothing",
    switch=(bool, option(False, "switch")),
    count=(int, option(3, "count", at_least=1)),
    pace=(float, option(1e-3, "pace", above=0)),
    path=(str, option("", "path")),
    limit=(float | None, option(None, "limit")),
    sizes=(tuple[int, ...], option((1, 2), "sizes")),
    nothing=(tuple[float, ...], option((), "nothing")),
)


@pytest.mark.parametrize("part", [RIGHT, thing("Nothing"), thing("Nothing", undecorated)])
def test_a_right_component_passes(part):
    assert failing(part) == set()


def test_every_check_has_a_component_that_fails_it():
    names = sentences(component_checks.checks_of(RIGHT))
    assert {TORCH}.union(*(expected for _, expected in WRONG)) == names


@pytest.mark.parametrize(
    ("mistake", "check", "said"),
    [
        ("Can be assigned in bounds", FROZEN, "n can be assigned; decorate the class"),
        ("Forgets the decorator", FROZEN, "decorate the class with @component"),
        ("Has an underscore in its name", NAMED, "as in 'my-thing'"),
        ("Has capitals in an alias", NAMED, "as in 'fed-x'"),
        ("Cites nothing", DOCUMENTED, 'give the paper, year and equation, or "new"'),
        ("Has a field that is no option", EXPLAINS, 'declare it as option(default, "help")'),
        ("Refuses its default", STORED, "n: 0 is not allowed; allowed: at least 1"),
        ("Has a comma in an element", TYPED, "the default ('a,b',) typed as 'a,b' is read as"),
    ],
)
def test_reasons_say_what_to_change(mistake, check, said):
    (part,) = (p for p, _ in WRONG if p.summary() == f"{mistake}.")
    assert said in reasons(part)[check]


MODULE = """
from bflcore.options import Component
{imports}

class Thing(Component):
    '''Do a thing.'''

    kind = "logger"
    name = "thing"
"""


@pytest.fixture
def declared(tmp_path, monkeypatch):
    """Return a function that writes a module, of which no other test knows, and loads its part."""
    import importlib
    import sys

    written = []
    monkeypatch.syspath_prepend(tmp_path)

    def declare(imports, break_afterwards=None):
        module = f"kit_declaration_{tmp_path.name}_{len(written)}".replace("-", "_")
        path = tmp_path / f"{module}.py"
        path.write_text(MODULE.format(imports=imports))
        written.append(module)
        part = importlib.import_module(module).Thing
        if break_afterwards:
            path.write_text(break_afterwards)
        return part

    yield declare
    for module in written:
        sys.modules.pop(module, None)


def verdict(part):
    (check,) = (check for check in checks(part) if check.name == TORCH)
    return check.outcome()


def test_a_declaration_without_torch_passes_whatever_it_prints(declared):
    assert verdict(declared("print('hello')")).state == "ok"


def test_a_declaration_that_imports_torch_fails(declared):
    part = declared("from bflcore.models import networks")  # which imports torch
    assert failing(part) == set()
    outcome = verdict(part)
    assert outcome.state == "failed"
    assert "imports torch, which makes every bfl command slow" in outcome.reason


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("raise SystemExit(3)", "fails: exit status 3"),
    ],
)
def test_a_declaration_that_cannot_be_imported_alone_fails(declared, source, said):
    assert said in verdict(declared("", break_afterwards=source)).reason
