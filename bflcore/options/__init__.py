"""Components and their options.

A component is a frozen attrs class whose fields are its options. One declaration with `option`
is the source of validation, listing, storage and command-line parsing:

    @component
    class Variational(LocalInference):
        \"\"\"Fit a mean-field Gaussian by variational inference.\"\"\"

        name = "variational"
        reference = "Blundell et al. 2015, eq. 2"
        kl_weight: float = option(1.0, "weight of the KL term", at_least=0)

Conversion is strict (no silent ``3.7 -> 3`` or ``"False" -> True``) and unknown keys are refused
with the nearest right name, in Python (``Variational(kl_wieght=1)``) as in files and flags.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, cast, dataclass_transform

import attrs

from bflcore.errors import OptionError, unknown

__all__ = [
    "Component",
    "Option",
    "as_dict",
    "build",
    "canonical",
    "changed",
    "component",
    "find_option",
    "label",
    "option",
    "options_of",
    "type_name",
    "without_none",
]

T = TypeVar("T")
C = TypeVar("C", bound="Component")


class Component:
    """Base of everything a plugin can contribute.

    Final subclasses have a `name`, possibly `aliases` (a paper's abbreviation) and a `reference`
    (paper, year, equation), and a docstring whose first line ``bfl list`` shows. The fields of a
    component are its options, nothing else.

    `expected_failures` maps checks of the conformance kit (`bflcore.testing`) that a component
    cannot pass to the reasons why. `hides` names inherited options that mean nothing here: they
    are not listed and cannot be set. `tags` are claims and declarations; `known_tags` says what
    each tag of the kind promises.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    reference: ClassVar[str] = ""
    expected_failures: ClassVar[Mapping[str, str]] = types.MappingProxyType({})
    hides: ClassVar[tuple[str, ...]] = ()
    tags: ClassVar[frozenset[str]] = frozenset()
    known_tags: ClassVar[Mapping[str, str]] = types.MappingProxyType({})

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "name" in vars(cls) and "aliases" not in vars(cls):
            cls.aliases = ()  # they belong to the base's name

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the docstring."""
        return (cls.__doc__ or "").strip().split("\n", 1)[0]

    def replace(self, **options: object) -> Self:
        """Return the component with some of its options replaced."""
        return cast("Self", attrs.evolve(cast("Any", self), **options))


LARGEST = 2**63 - 1  # the largest integer that tensors and files hold


@attrs.frozen
class Option:
    """What one option is: its name, type, default, help, and the values it allows in words.

    `aliases` are other spellings of the name, accepted wherever the name is.
    """

    name: str
    type: Any
    default: Any
    help: str
    allowed: str
    aliases: tuple[str, ...] = ()


@attrs.frozen
class Bounds:
    """The values an option allows; calling it on a value raises `OptionError` when refused."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [
            f"{word} {bound:g}"
            for word, bound in (
                ("at least", self.at_least),
                ("above", self.above),
                ("at most", self.at_most),
                ("below", self.below),
            )
            if bound is not None
        ]
        return " and ".join(words) if words else " | ".join(self.choices)

    def admits(self, value: Any) -> bool:
        """Return whether `value` (or each of its elements) is allowed; NaN never is."""
        if value is None:
            return True
        if isinstance(value, Sequence) and not isinstance(value, str):
            return all(self.admits(element) for element in value)
        if self.choices:
            return value in self.choices
        if isinstance(value, str):
            return "\0" not in value
        endless = isinstance(value, float) and not math.isfinite(value)
        if endless or (isinstance(value, int) and abs(value) > LARGEST):
            return False
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        # `as_dict` leaves None out, so None may only stand for itself: it would come back
        # as the default.
        if value is None and attribute.default is not None:
            raise OptionError(
                f"{attribute.name}: None is not allowed; allowed: {str(self) or 'a value'} "
                f"(default {attribute.default!r})"
            )
        if not self.admits(value):
            number = isinstance(value, int | float)
            allowed = str(self) or ("a finite number" if number else "text without NUL")
            if isinstance(value, int) and abs(value) > LARGEST:
                allowed = f"an integer of at most {LARGEST:.1g} in size"
            raise OptionError(f"{attribute.name}: {value!r} is not allowed; allowed: {allowed}")


def option(
    default: T,
    help: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
    aliases: Sequence[str] = (),
) -> T:
    """Declare an option of a component: its default, one line of help, and what is allowed.

    `at_least`/`at_most` are inclusive, `above`/`below` exclusive; `choices` lists the strings
    allowed. A float option refuses NaN and infinities. A tuple option checks each element.
    `aliases` are other spellings of the name; values are stored under the name.
    """
    bounds = Bounds(at_least, at_most, above, below, tuple(choices))
    metadata = {"help": help, "aliases": tuple(aliases)}
    field: T = attrs.field(default=default, validator=bounds, metadata=metadata)
    return field


# `option` is not named as a field specifier: type checkers would not see its positional default.
@dataclass_transform(frozen_default=True, kw_only_default=True)
def component(cls: type[C]) -> type[C]:
    """Make a class a component: a frozen attrs class with keyword-only options.

    Its constructor raises `OptionError` for an unknown option, with the nearest name.
    """
    made: Any = attrs.frozen(kw_only=True)(cls)
    defaults = {field.name: field.default for field in attrs.fields(made)}
    initialise = made.__init__

    @functools.wraps(initialise)
    def checked(self: C, **options: Any) -> None:
        options = canonical(made, options)
        for name, value in options.items():
            # A copy (`attrs.evolve`) is made of all fields: hidden ones pass as they are.
            if name not in defaults or (name in made.hides and value != defaults[name]):
                called = getattr(cls, "name", cls.__name__)
                known = [name for name in defaults if name not in made.hides]
                raise unknown(f"option of {cls.kind} {called}:", name, known)
        initialise(self, **options)

    made.__init__ = checked
    return cast("type[C]", made)


def canonical(cls: type[Component], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under the options' names, aliases replaced.

    Raises `OptionError` where an alias and its name are both given.
    """
    names = {alias: declared.name for declared in options_of(cls) for alias in declared.aliases}
    for alias in names.keys() & values.keys():
        if names[alias] in values:
            raise OptionError(f"{alias}: {names[alias]} is also given, which means the same")
    return {names.get(name, name): value for name, value in values.items()}


def changed(part: Component) -> dict[str, object]:
    """Return the options of a component that differ from its class's defaults."""
    values = {o.name: (getattr(part, o.name), o.default) for o in options_of(type(part))}
    return {name: value for name, (value, default) in values.items() if value != default}


def options_of(cls: type[Component]) -> tuple[Option, ...]:
    """Return the options that a component class declares, in order."""
    hashable: Any = cls  # which mypy does not see
    return _options_of(hashable)


@functools.cache
def _options_of(cls: Any) -> tuple[Option, ...]:
    # Types of other fields are not resolved: a posterior's are tensors, and torch stays unimported.
    return tuple(
        Option(
            field.name,
            _type_of(cls, field.name),
            field.default,
            field.metadata["help"],
            str(field.validator),
            field.metadata["aliases"],
        )
        for field in (attrs.fields(cls) if attrs.has(cls) else ())
        if "help" in field.metadata and field.name not in cls.hides
    )


def _type_of(cls: type[object], name: str) -> Any:
    """Return the type of one field; other annotations may name what is not imported."""
    owner = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
    alone = types.SimpleNamespace(__annotations__={name: inspect.get_annotations(owner)[name]})
    module = vars(sys.modules[owner.__module__])
    return typing.get_type_hints(alone, module, dict(vars(owner)))[name]


def build(cls: type[C], values: Mapping[str, object], where: str) -> C:
    """Build a component from plain values (as TOML and JSON give them).

    `where` prefixes the names in errors (``inference.kl_weight``; see `label`). Raises
    `OptionError` for an unknown key, a value of the wrong type, or one outside the bounds.
    """
    typed = {}
    for key, value in canonical(cls, values).items():
        declared = find_option(cls, key, where)
        try:
            typed[key] = _structure(value, declared.type)
        except (TypeError, OverflowError):
            raise OptionError(
                f"{label(where, key)}: {value!r} is not allowed; "
                f"allowed: {type_name(declared.type)} ({declared.help})"
            ) from None
    try:
        return cls(**typed)
    except OptionError as error:
        name, _, reason = str(error).partition(": ")
        raise OptionError(f"{label(where, name)}: {reason}") from None


def find_option(cls: type[Component], key: str, where: str) -> Option:
    """Return an option by its name or alias. Raises `OptionError` with the nearest name."""
    known = options_of(cls)
    found = next((o for o in known if key == o.name or key in o.aliases), None)
    if not known:
        raise OptionError(
            f"{label(where, key)}: {cls.kind} {cls.name} has no options; leave it out"
        )
    if found is None:
        raise unknown(
            "option",
            label(where, key),
            [label(where, declared.name) for declared in known],
            f"bfl show {cls.kind} {cls.name} explains them",
        )
    return found


def label(where: str, name: str) -> str:
    """Return how errors call an option: ``inference.lr``, or ``--lr`` where `where` is ``--``."""
    return f"--{name.replace('_', '-')}" if where == "--" else f"{where}.{name}"


def as_dict(part: Component) -> dict[str, object]:
    """Return the name and every option of a component as plain, storable values.

    Options that are ``None`` are left out (TOML has no null); `build` gives them back.
    """
    values = {o.name: getattr(part, o.name) for o in options_of(type(part))}
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v is not None}
    return {"name": part.name, **plain}


def type_name(kind: Any) -> str:
    """Return an option's type in words: ``int``, ``tuple of int``, ``float or none``."""
    if (inner := without_none(kind)) is not kind:
        return f"{type_name(inner)} or none"
    if typing.get_origin(kind) is tuple:
        return f"tuple of {type_name(typing.get_args(kind)[0])}"
    return str(kind.__name__)


def without_none(kind: Any) -> Any:
    """Return T where a type is ``T | None`` or ``Optional[T]``, any other type as it is."""
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return kind
    return next(member for member in typing.get_args(kind) if member is not type(None))


def _structure(value: Any, kind: Any) -> Any:
    """Return a plain value as an option's type. Raises `TypeError` if it is of another one."""
    inner = without_none(kind)
    if value is None and inner is not kind:
        return None
    if typing.get_origin(inner) is tuple and isinstance(value, list | tuple):
        return tuple(_structure(element, typing.get_args(inner)[0]) for element in value)
    accepted = (int, float) if inner is float else inner
    if isinstance(value, accepted) and (inner is bool or not isinstance(value, bool)):
        return inner(value)
    raise TypeError(value)
