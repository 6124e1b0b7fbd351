"""What the conformance kit says of a part, and parts with one mistake each."""

from __future__ import annotations

from bflcore import component
from bflcore.testing import checks

# About the module that declares a part: those made here have none of their own.
TORCH = "declares itself without torch"


def wrong(base, mistake, decorate=component, **fields):
    """Return a subclass of `base` that differs in `fields` alone; `mistake` says what is wrong."""
    fields = {"name": "wrong", "reference": "new", "__doc__": f"{mistake}.", **fields}
    return decorate(type("Wrong", (base,), fields))


def reasons(part):
    """Return every check that `part` fails, with the reason."""
    outcomes = {check.name: check.outcome() for check in checks(part) if check.name != TORCH}
    return {name: found.reason for name, found in outcomes.items() if found.state != "ok"}


def failing(part):
    """Return the names of the checks that `part` fails."""
    return set(reasons(part))


def sentences(functions):
    """Return the names under which the kit lists checks."""
    return {function.__name__.replace("_", " ") for function in functions}


def label(thing):
    """Name a wrong part by its mistake, and the checks by their number, in the ids of tests."""
    return thing.summary().rstrip(".").replace(" ", "_") if isinstance(thing, type) else len(thing)
