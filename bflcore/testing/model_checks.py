"""Checks of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn

from bflcore.errors import OptionError
from bflcore.models.base import Model
from bflcore.models.networks import check_network
from bflcore.options import options_of
from bflcore.randomness import seeded_globally
from bflcore.testing.surroundings import undisturbed

__all__ = ["checks_of"]

Part = type[Model]

SHAPES = ((4,), (1, 28, 28), (3, 32, 32))  # a table, grey images, colour images
OUTPUTS = 3


def checks_of(part: Part) -> Iterator[Callable[[Part], None]]:  # noqa: ARG001 - kinds may ask
    """Yield the checks of a model."""
    yield from (gives_an_output_per_class, has_a_head, samples_are_independent, repeats_itself)
    yield leaves_the_process_as_it_was


def gives_an_output_per_class(part: Part) -> None:
    """The network maps ``[B, *input_shape]`` to ``[B, outputs]``."""
    for shape, network in _networks(part):
        with torch.no_grad():
            found = network(torch.zeros(2, *shape))
        if tuple(found.shape) != (2, OUTPUTS):
            raise AssertionError(
                f"two samples {shape} give {tuple(found.shape)}, not (2, {OUTPUTS})"
            )


def has_a_head(part: Part) -> None:
    """`head` names a module with parameters, and is not the whole network."""
    for _, network in _networks(part):
        head = part().head(network)
        modules = dict(network.named_modules())
        if head not in modules:
            raise AssertionError(
                f"head {head!r} is not a module; modules: {', '.join(filter(None, modules))}"
            )
        inside, total = (len(list(m.parameters())) for m in (modules[head], network))
        if inside in {0, total}:
            raise AssertionError(
                f"head {head!r} holds {inside} of the network's {total} parameter tensors; it must "
                "hold some of them, but not all"
            )


def samples_are_independent(part: Part) -> None:
    """An output depends on the parameters and its own sample alone, for all choices of options.

    Running statistics, batch statistics and random numbers are not allowed.
    """
    for choice in _choices(part):
        for shape, network in _built(choice):
            check_network(network, _samples(choice, shape))


def repeats_itself(part: Part) -> None:
    """The same seed gives the same initialisation."""
    for (shape, first), (_, second) in zip(_networks(part), _built(part()), strict=True):
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            if not torch.equal(one, other):
                raise AssertionError(
                    f"the initialisation for samples {shape} differs under the same seed; draw it "
                    "from torch's global generator, which bfl seeds"
                )


def leaves_the_process_as_it_was(part: Part) -> None:
    """Building a network prints nothing, and changes no setting of torch for everybody."""
    with undisturbed("building the network"):
        tuple(_built(part()))


@lru_cache(maxsize=1)  # a part's checks follow each other, and large networks take long to build
def _networks(part: Part) -> tuple[tuple[tuple[int, ...], nn.Module], ...]:
    return tuple(_built(part()))


def _samples(model: Model, shape: tuple[int, ...]) -> Tensor:
    """Return two samples ``[2, *shape]``: normal, or codes 0 and 1 where the model reads codes."""
    normal = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    try:
        model.check_samples(normal)
    except OptionError:
        return (normal > 0).to(normal.dtype)
    return normal


def _choices(part: Part) -> Iterator[Model]:
    """Yield the model with its defaults, and with every other choice of an option (a norm)."""
    yield part()
    for one in options_of(part):
        for choice in one.allowed.split(" | ") if " | " in one.allowed else ():
            if choice != one.default:
                yield part(**{one.name: choice})


def _built(model: Model) -> Iterator[tuple[tuple[int, ...], nn.Module]]:
    """Yield a network for every shape that the model accepts."""
    accepted = False
    for shape in SHAPES:
        try:
            with seeded_globally(0, "initialisation"):
                network = model.network(shape, OUTPUTS)
        except OptionError:
            continue
        accepted = True
        yield shape, network
    if not accepted:
        raise AssertionError(f"no network for any of the shapes {SHAPES}")
