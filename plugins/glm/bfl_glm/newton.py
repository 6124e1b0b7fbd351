"""Newton's method for one client's posterior: the common mean, or the client's own mode.

The client's objective is its loss plus the cavity's penalty. It is expanded around the mean that
all clients agree on; where the step would raise the objective, around its own mode instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from bflcore import Posterior

__all__ = ["Found", "conjugate_gradients", "posterior_of"]

# Of the loss in nats: less than it is a difference of rounding.
ROUNDING = 1e-9
STEPS = 100  # to a client's own mode
HALVINGS = 60  # of a step: beyond, even float64 cannot tell it from none
SOLVED = 1e-14  # squared residual of a linear system over that of zero
ITERATIONS = 500


class _Expanded(Protocol):
    @property
    def loss(self) -> float: ...


E = TypeVar("E", bound=_Expanded)
Q = TypeVar("Q", bound="Posterior")
Found = tuple[Q, float]


def posterior_of(
    start: Tensor,
    samples: int,
    loss: Callable[[Tensor], float],
    penalty: Callable[[Tensor], float],
    expand: Callable[[Tensor], E],
    update: Callable[[E, Tensor], Q],
    steps: int = STEPS,
) -> Found[Q]:
    """Return the Gaussian ``[P]`` of a client's expanded loss, and its mean loss at the start.

    `loss` and `penalty` add up to the objective in nats; `expand` returns the expansion of the loss
    around weights ``[P]``, and `update` the cavity times the exponential of minus an expansion.
    At most `steps` lead to the client's own mode.
    """

    def objective(weights: Tensor) -> float:
        return loss(weights) + penalty(weights)

    around, point = expand(start), start
    mean, highest = around.loss / max(1, samples), objective(start)
    found = update(around, point)
    if objective(found.mean) <= highest + ROUNDING * (1 + abs(highest)):
        return found, mean
    for _ in range(steps):  # with halved steps, to the client's own mode
        step = found.mean - point
        for _ in range(HALVINGS):
            if objective(point + step) <= highest:
                break
            step = step / 2
        gained = highest - objective(point + step)
        if not gained > ROUNDING * (1 + abs(highest)):  # nor if it is not a number
            break
        point = point + step
        highest -= gained
        around = expand(point)
        found = update(around, point)
    return found, mean


def conjugate_gradients(
    times: Callable[[Tensor], Tensor], solve: Callable[[Tensor], Tensor], right: Tensor
) -> Tensor:
    """Return x ``[P]`` such that `times` of x is `right`, preconditioned by `solve`.

    Hestenes & Stiefel 1952; Golub & Van Loan 2013, algorithm 11.5.1. It ends when the residual is
    1e-7 of that of zero, in the preconditioner's norm: of a step towards a mode, the next one
    corrects it.
    """
    found, residual = right.new_zeros(right.shape), right
    across = solve(residual)
    direction, size = across, float(residual @ across)
    enough = SOLVED * size
    for _ in range(ITERATIONS):
        if not size > enough:
            break
        image = times(direction)
        step = size / float(direction @ image)
        found = found + step * direction
        residual = residual - step * image
        across = solve(residual)
        before, size = size, float(residual @ across)
        direction = across + (size / before) * direction
    return found
