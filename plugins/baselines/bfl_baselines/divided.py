"""A network as two functions: a body, and a head on the body's features."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from bflcore import Layout
from bflcore.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from bflcore import Problem
else:
    torch = lazy("torch")

__all__ = ["Divided"]


class Divided:
    """K networks, divided into a shared body and a personal head.

    Many heads on one body then cost one pass through the body. This needs a network that ends with
    the module of the personal parameters; for other networks the samples serve as features, and the
    whole network as head.

    Law: ``outputs(w, z, features(w, x)) == problem.forward(problem.layout.join(w, z), x)``.
    """

    def __init__(self, problem: Problem, sample: Tensor) -> None:
        """Divide the problem's network; `sample` ``[1, ...]`` is any input of it."""
        self._problem = problem
        body, layout = copy.deepcopy(problem.network).requires_grad_(False), problem.layout
        path = personal_module(layout)
        self._head = body.get_submodule(path) if ends_with(body, path, sample) else None
        if self._head is not None:
            parent, _, name = path.rpartition(".")
            setattr(body.get_submodule(parent), name, torch.nn.Identity())
            self._body, self._of_body = body, part(layout, True)
            self._of_head = part(layout, False, f"{path}.")

    def features(self, w: Tensor, x: Tensor) -> Tensor:
        """Run bodies `w` ``[k, P_shared]`` on their own samples `x` ``[k, B, ...]``."""
        return x if self._head is None else run(self._body, self._of_body, w, x)

    def outputs(self, w: Tensor, z: Tensor, features: Tensor) -> Tensor:
        """Run heads `z` ``[k, P_personal]`` on the features of bodies `w`: ``[k, B, C]``."""
        if self._head is None:
            return self._problem.forward(self._problem.layout.join(w, z), features)
        return self._problem.shifted(run(self._head, self._of_head, z, features))


def personal_module(layout: Layout) -> str:
    """Return the path of the module that holds exactly the personal parameters ("": none does).

    There must also be shared ones.
    """
    if not layout.shared_total:
        return ""
    tensors = list(zip(layout.names, layout.shared, strict=True))
    first = next((name for name, shared in tensors if not shared), "").split(".")
    for depth in range(len(first) - 1, 0, -1):
        path = ".".join(first[:depth])
        if all(name.startswith(f"{path}.") != shared for name, shared in tensors):
            return path
    return ""


def ends_with(network: nn.Module, path: str, sample: Tensor) -> bool:
    """Return whether the output of `network` is that of the first run of its module `path`.

    `sample` ``[1, ...]`` is any input of the network.
    """
    if not path:
        return False
    seen: list[Tensor] = []

    def record(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(output)

    hook = network.get_submodule(path).register_forward_hook(record)
    with torch.no_grad():
        output = network(sample)
    hook.remove()
    return bool(seen) and seen[0] is output


def part(layout: Layout, shared: bool, prefix: str = "") -> Layout:
    """Return the layout of the shared or the personal tensors, without `prefix` in their names."""
    tensors = zip(layout.names, layout.shapes, layout.shared, strict=True)
    chosen = [(name.removeprefix(prefix), shape) for name, shape, s in tensors if s is shared]
    names, shapes = zip(*chosen, strict=True)
    return Layout(names, shapes, (shared,) * len(chosen))


def run(network: nn.Module, layout: Layout, vectors: Tensor, x: Tensor) -> Tensor:
    """Run K networks ``[K, P]`` on their own inputs ``[K, B, ...]``."""

    def call(vector: Tensor, x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(network, layout.unflatten(vector), (x,))
        return result

    if len(vectors) == 1:  # vmap over one client costs time and gains nothing
        return call(vectors[0], x[0])[None]
    return torch.func.vmap(call)(vectors, x)
