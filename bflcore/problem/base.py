"""The problem: a network, a likelihood, and the data of every client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import attrs

from bflcore.lazy import lazy
from bflcore.messages import Cohort
from bflcore.problem.calibration.base import answer
from bflcore.problem.label_prior import LABEL_COUNTS, label_counts
from bflcore.problem.scaling import Scaling, moments

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from bflcore.data.base import Dataset, Integers
    from bflcore.data.partition import Partition
    from bflcore.layout import Layout
    from bflcore.problem.calibration.base import Calibrator
    from bflcore.problem.likelihoods import Likelihood
else:
    torch = lazy("torch")

__all__ = ["Problem", "Shares"]

SAMPLES = ("train", "test", "validation", "calibration")  # fields of a problem


@attrs.frozen(eq=False)
class Shares:
    """The samples of all clients in one block; client i holds the view ``x[start[i]:end[i]]``.

    `x` ``[N, ...]``, `y` ``[N]`` or ``[N, T]`` are as the data set has them; `of` applies the
    `scaling`.
    """

    x: Tensor
    y: Tensor
    start: tuple[int, ...]
    end: tuple[int, ...]
    scaling: Scaling | None = None

    @classmethod
    def gather(
        cls,
        x: Tensor,
        y: Tensor,
        indices: Sequence[Integers | Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> Shares:
        """Group samples ``[N, ...]`` by client, given each client's `indices` into them."""
        ends = tuple(accumulate(map(len, indices)))
        flat = torch.cat([torch.as_tensor(index, dtype=torch.int64) for index in indices])
        return cls(x[flat].to(device), y[flat].to(device), (0, *ends[:-1]), ends)

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Return one client's samples ``[n, ...]`` and targets ``[n]`` or ``[n, T]``."""
        rows = slice(self.start[client], self.end[client])
        x, y = self.x[rows], self.y[rows]
        return self.scaling(x, y) if self.scaling else (x, y)

    def size(self, client: int) -> int:
        """Return how many samples a client holds."""
        return self.end[client] - self.start[client]

    def share_memory(self) -> None:
        """Move the tensors to shared memory, so that worker processes do not copy them."""
        self.x.share_memory_()
        self.y.share_memory_()


@attrs.frozen(eq=False)
class Problem:
    """A network, its likelihood, and the samples of every client by what they are for.

    `initial` ``[P]`` is the network's random initialisation; `clients` are the ids that train and
    `novel` those held out of training; every random draw of the run derives from `seed`; `rounds`
    is the length of the run (0: unknown). `survey` holds what the clients answered before round 1,
    summed, by name (see `LocalInference.survey`); it is empty until then. Where `standardise` is
    set, it scales every client's samples. `features` ``[F]`` names those of a table, `indicators`
    ``[F]`` says which of them are 0 or 1. `calibrators` are fitted to the `calibration` samples
    after the last round. `foreign` ``[N, ...]`` are samples unlike those of any client, as the
    network would get them without scaling: no client trains on them, and in the last round each
    says how well its model tells them from its test samples. `offset` ``[C]`` is added to the
    outputs of every network: a problem with an offset is that of one client (see `for_client`).
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
    standardise: bool = False
    survey: Mapping[str, Tensor] = attrs.field(factory=dict)
    validation: Shares | None = None
    calibration: Shares | None = None
    calibrators: tuple[Calibrator, ...] = ()
    indicators: Tensor | None = None
    features: tuple[str, ...] = ()
    foreign: Tensor | None = None
    offset: Tensor | None = None

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
        """Combine a partitioned data set and a network; the last `novel` clients are held out.

        Parameters, samples and real targets are converted to `dtype` (default: float32), samples
        only once they are gathered: bytes stay bytes until then (see `Dataset`).
        """
        dtype = dtype or torch.float32

        def shares(x: object, y: object, indices: Sequence[Integers]) -> Shares:
            targets = torch.as_tensor(y)
            if targets.is_floating_point():
                targets = targets.to(dtype)
            gathered = Shares.gather(torch.as_tensor(x), targets, indices, device)
            return attrs.evolve(gathered, x=dataset.scaled(gathered.x).to(dtype))

        train = dataset.x, dataset.y
        test = (dataset.x_test, dataset.y_test) if partition.held_out else train
        network = network.to(device, dtype)
        ids = tuple(range(len(partition.train)))
        schema = dataset.schema
        trained = len(ids) - novel
        return cls(
            network,
            layout,
            likelihood,
            train=shares(*train, partition.train),
            test=shares(*test, partition.test),
            initial=layout.flatten(dict(network.named_parameters())),
            clients=ids[:trained],
            novel=ids[trained:],
            seed=seed,
            rounds=rounds,
            standardise=dataset.standardise,
            validation=shares(*train, partition.validation) if partition.validation else None,
            calibration=shares(*train, partition.calibration) if partition.calibration else None,
            indicators=torch.tensor(schema.indicators, device=device) if schema else None,
            features=schema.features if schema else (),
        )

    def surveyed(self, survey: Mapping[str, Tensor]) -> Problem:
        """Return the problem with the sums ``[...]`` that the clients' answers gave."""
        if not survey:
            return self
        scaling = Scaling.of(survey, self.indicators) if self.standardise else None
        if scaling and not self.likelihood.scales_targets:
            scaling = attrs.evolve(scaling, y=None)
        scaled: dict[str, Any] = {
            name: attrs.evolve(s, scaling=scaling) for name, s in self.samples.items()
        }
        return attrs.evolve(self, survey=survey, **scaled)

    def for_client(self, cohort: Cohort, *, predicting: bool = False) -> Problem:
        """Return the problem of the one client in `cohort`: its outputs with its own offset.

        Without a likelihood that counts labels, that is this problem. The counts are those in the
        client's memory where it has them, else those of its training samples.
        """
        if not self.likelihood.counts_labels:
            return self
        if len(cohort.clients) > 1:
            raise ValueError(f"an offset is one client's; given: clients {cohort.clients}")
        kept = cohort.memory.get(LABEL_COUNTS)
        counts = self.label_counts(cohort) if kept is None else kept
        return self.given_labels(counts[0], predicting=predicting)

    def for_server(self) -> Problem:
        """Return the problem of a client without samples, to predict with the server's model."""
        if not self.likelihood.counts_labels:
            return self
        nothing = torch.zeros(self._classes(), dtype=torch.int64, device=self.device)
        return self.given_labels(nothing, predicting=True)

    def given_labels(self, counts: Tensor, *, predicting: bool) -> Problem:
        """Return the problem of a client with `counts` ``[C]`` of training samples per label."""
        pooled = self.survey.get(LABEL_COUNTS, torch.zeros_like(counts))
        offset = self.likelihood.offset(counts, pooled, predicting=predicting)
        return attrs.evolve(self, offset=None if offset is None else offset.to(self.initial))

    def label_counts(self, cohort: Cohort) -> Tensor:
        """Return how many training samples of each label ``[K, C]`` the clients have."""
        return label_counts(cohort, self._classes())

    def _classes(self) -> int:
        """Return how many outputs the network has."""
        with torch.no_grad():
            x = self.train.x.new_zeros(1, 1, *self.train.x.shape[1:])
            return self.forward(self.initial[None], x).shape[-1]

    def moments(self, client: int) -> dict[str, Tensor]:
        """Return what one client answers before all samples are standardised (see `Scaling`)."""
        return moments(*self.train.of(client), self.indicators)

    def uncalibrated(self) -> dict[str, Tensor]:
        """Return the answer ``[...]`` of a client without calibration samples: zeros."""
        with torch.no_grad():
            x = self.train.x.new_zeros(1, 1, *self.train.x.shape[1:])
            one = self.likelihood.predictive(self.forward(self.initial[None], x)[:, None])
        y = self.train.y.new_zeros(1, *self.train.y.shape[1:])
        form = answer(self.calibrators, [(one, y)])
        return {name: torch.zeros_like(tensor) for name, tensor in form.items()}

    @property
    def samples(self) -> dict[str, Shares]:
        """The samples that there are, by the name of their field."""
        found = {name: getattr(self, name) for name in SAMPLES}
        return {name: shares for name, shares in found.items() if shares is not None}

    @property
    def device(self) -> torch.device:
        """Device of the data and the parameters."""
        return self.train.x.device

    def forward(
        self, weights: Tensor, x: Tensor, buffers: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Run K networks on their own samples: ``[K, P]``, ``[K, B, ...]`` -> ``[K, B, C]``.

        The outputs have the client's `offset`, as the likelihood takes them.
        `buffers` ``[K, ...]`` replace the network's buffers by name (masks or noise).
        """
        buffers = dict(buffers or {})
        if len(weights) == 1:  # vmap over one client costs 0.3 ms per step and gains nothing
            alone = {name: tensor.squeeze(0) for name, tensor in buffers.items()}
            outputs = self._call(weights.squeeze(0), x.squeeze(0), alone).unsqueeze(0)
        else:
            outputs = torch.func.vmap(self._call)(weights, x, buffers)
        return self.shifted(outputs)

    def shifted(self, outputs: Tensor) -> Tensor:
        """Return outputs ``[..., C]`` of the bare network as the likelihood takes them.

        For whoever runs the network without `forward`.
        """
        return outputs if self.offset is None else outputs + self.offset

    def outputs(self, draws: Tensor, x: Tensor) -> Tensor:
        """Run S draws of K networks: ``[K, S, P]``, ``[K, B, ...]`` -> ``[K, S, B, C]``."""
        return torch.stack([self.forward(draws[:, s], x) for s in range(draws.shape[1])], dim=1)

    def _call(self, vector: Tensor, x: Tensor, buffers: dict[str, Tensor]) -> Tensor:
        tensors = self.layout.unflatten(vector) | buffers
        result: Tensor = torch.func.functional_call(self.network, tensors, (x,))
        return result

    def cohort(self, clients: Sequence[int], memory: Mapping[str, Tensor], round: int) -> Cohort:
        """Stack the training samples of `clients` ``[K, N, ...]``, padded to the largest client.

        `memory` ``[K, ...]`` holds the tensors that the clients keep.
        """
        xs, ys = zip(*map(self.train.of, clients), strict=True)
        if len(clients) == 1:  # views, not copies
            x, y = xs[0][None], ys[0][None]
        else:
            x, y = (
                torch.nn.utils.rnn.pad_sequence(list(each), batch_first=True) for each in (xs, ys)
            )
        novel = all(client in self.novel for client in clients)
        return Cohort(tuple(clients), x, y, tuple(map(len, xs)), memory, self.seed, round, novel)
