"""The problem: a network, a likelihood, and the data of every client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from bflcore.lazy import lazy
from bflcore.messages import Cohort

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from bflcore.data.base import Dataset
    from bflcore.data.partition import Partition
    from bflcore.layout import Layout
    from bflcore.problem.likelihoods import Likelihood
else:
    torch = lazy("torch")

__all__ = ["Problem", "Shares"]


@attrs.frozen(eq=False)
class Shares:
    """Every client's samples in one block: client i holds the view ``x[start[i]:end[i]]``.

    `x` ``[N, ...]``, `y` ``[N]`` or ``[N, T]``.
    """

    x: Tensor
    y: Tensor
    start: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def gather(
        cls,
        x: Tensor,
        y: Tensor,
        indices: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> Shares:
        """Order the samples by client, once."""
        sizes = [len(index) for index in indices]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        flat = torch.cat([torch.as_tensor(index, dtype=torch.int64) for index in indices])
        starts = tuple(end - size for end, size in zip(ends, sizes, strict=True))
        return cls(x[flat].to(device), y[flat].to(device), starts, tuple(ends))

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Return one client's samples and targets."""
        where = slice(self.start[client], self.end[client])
        return self.x[where], self.y[where]

    def size(self, client: int) -> int:
        """Number of samples a client holds."""
        return self.end[client] - self.start[client]

    def share_memory(self) -> None:
        """Move the tensors to memory that worker processes map instead of copying."""
        self.x.share_memory_()
        self.y.share_memory_()


@attrs.frozen(eq=False)
class Problem:
    """What is learned, and from what.

    `initial` ``[P]`` is the network's random initialisation; `clients` are the ids that train and
    `novel` those held out of training; `seed` owns every draw of the run; `rounds` is how many the
    run will have (0: not known).
    """

    network: nn.Module
    layout: Layout
    likelihood: Likelihood
    train: Shares
    test: Shares
    initial: Tensor
    clients: tuple[int, ...]
    novel: tuple[int, ...] = ()
    seed: int = 0
    rounds: int = 0

    @classmethod
    def assemble(
        cls,
        dataset: Dataset,
        partition: Partition,
        network: nn.Module,
        layout: Layout,
        likelihood: Likelihood,
        *,
        novel: int = 0,
        seed: int = 0,
        rounds: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Problem:
        """Put a divided data set and a network together; the last `novel` clients are held out.

        `dtype` is that of the parameters and the samples, by default float32.
        """
        dtype = dtype or torch.float32

        def tensors(x: object, y: object) -> tuple[Tensor, Tensor]:
            targets = torch.as_tensor(y)
            return (
                torch.as_tensor(x).to(dtype),
                targets.to(dtype) if targets.is_floating_point() else targets,
            )

        x, y = tensors(dataset.x, dataset.y)
        held = tensors(dataset.x_test, dataset.y_test) if partition.held_out else (x, y)
        network = network.to(device, dtype)
        total = len(partition.train)
        return cls(
            network,
            layout,
            likelihood,
            Shares.gather(x, y, [i.tolist() for i in partition.train], device),
            Shares.gather(*held, [i.tolist() for i in partition.test], device),
            layout.flatten(dict(network.named_parameters())),
            tuple(range(total - novel)),
            tuple(range(total - novel, total)),
            seed,
            rounds,
        )

    @property
    def device(self) -> torch.device:
        """Where the data and the parameters live."""
        return self.train.x.device

    def forward(
        self, weights: Tensor, x: Tensor, buffers: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Run K networks on their own samples: ``[K, P]``, ``[K, B, ...]`` -> ``[K, B, C]``.

        `buffers` ``[K, ...]`` replace the network's buffers by name: masks, noise.
        """
        buffers = dict(buffers or {})
        if len(weights) == 1:  # vmap over one client costs 0.3 ms a step and buys nothing
            alone = {name: tensor.squeeze(0) for name, tensor in buffers.items()}
            return self._call(weights.squeeze(0), x.squeeze(0), alone).unsqueeze(0)
        return torch.func.vmap(self._call)(weights, x, buffers)

    def outputs(self, draws: Tensor, x: Tensor) -> Tensor:
        """Run S draws of K networks: ``[K, S, P]``, ``[K, B, ...]`` -> ``[K, S, B, C]``."""
        return torch.stack([self.forward(draws[:, s], x) for s in range(draws.shape[1])], dim=1)

    def _call(self, vector: Tensor, x: Tensor, buffers: dict[str, Tensor]) -> Tensor:
        tensors = self.layout.unflatten(vector) | buffers
        result: Tensor = torch.func.functional_call(self.network, tensors, (x,))
        return result

    def cohort(self, clients: Sequence[int], memory: Mapping[str, Tensor], round: int) -> Cohort:
        """Stack the training data of `clients`, padded to the largest; `memory` ``[K, ...]``."""
        parts = [self.train.of(client) for client in clients]
        sizes = tuple(len(x) for x, _ in parts)
        if len(parts) == 1:
            x, y = parts[0][0][None], parts[0][1][None]
        else:
            pad = torch.nn.utils.rnn.pad_sequence
            x = pad([x for x, _ in parts], batch_first=True)
            y = pad([y for _, y in parts], batch_first=True)
        novel = bool(clients) and all(client in self.novel for client in clients)
        return Cohort(tuple(clients), x, y, sizes, memory, self.seed, round, novel)
