"""A component with an option of every type."""

from bflcore import Component, component, option


@component
class Part(Component):
    """Do something.

    At length.
    """

    kind = "part"
    name = "part"

    rate: float = option(0.5, "a rate", above=0, at_most=1)
    steps: int = option(3, "steps", at_least=1)
    rule: str = option("adam", "a rule", choices=("adam", "sgd"))
    widths: tuple[int, ...] = option((100,), "widths", at_least=1)
    cap: int | None = option(None, "a cap", at_least=1)
    random: bool = option(False, "at random")
