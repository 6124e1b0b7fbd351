"""One client's model: predictions, its posterior, a network, a file."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from bflcore.api.inputs import samples
from bflcore.api.prediction import Prediction, prediction_of
from bflcore.errors import OptionError, RunError
from bflcore.lazy import lazy
from bflcore.messages import CALIBRATION, Broadcast, Cohort, within
from bflcore.problem.calibration.base import fit
from bflcore.problem.label_prior import LABEL_COUNTS
from bflcore.randomness import stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from bflcore.api import exporting, rebuild
    from bflcore.engines import client as work
    from bflcore.engines import pool
    from bflcore.experiments import description as describing
    from bflcore.experiments import models
    from bflcore.experiments.description import Description
    from bflcore.inference.base import LocalInference
    from bflcore.problem import Problem
    from bflcore.problem.calibration.base import Fitted
    from bflcore.problem.likelihoods import Predictive
    from bflcore.registry import loading
else:
    torch = lazy("torch")
    work = lazy("bflcore.engines.client")
    pool = lazy("bflcore.engines.pool")
    describing = lazy("bflcore.experiments.description")
    models = lazy("bflcore.experiments.models")
    exporting = lazy("bflcore.api.exporting")
    rebuild = lazy("bflcore.api.rebuild")
    loading = lazy("bflcore.registry.loading")

__all__ = ["ClientModel", "load_model"]

FORMAT = 1


@attrs.frozen(eq=False)
class ClientModel:
    """The model of one client, or the server's, as the last evaluation of the run used it.

    `id` is the owner's id; `number` the client's number in the run, from which the draws of a
    prediction derive: the same samples always give the same prediction. `memory` ``[...]`` is what
    the client keeps, `calibration` ``[...]`` its own sums, where calibrators use them. `settings`
    have the form of ``experiment.toml``.
    """

    id: int | str
    number: int
    problem: Problem = attrs.field(repr=False)
    inference: LocalInference = attrs.field(repr=False)
    broadcast: Broadcast = attrs.field(repr=False)
    memory: Mapping[str, Tensor] = attrs.field(repr=False)
    description: Description = attrs.field(repr=False)
    settings: Mapping[str, Any] = attrs.field(repr=False)
    size: int = 0  # training samples
    novel: bool = False
    calibration: Mapping[str, Tensor] = attrs.field(factory=dict, repr=False)

    def predict(self, x: Any, *, calibrated: bool = True) -> Prediction:
        """Predict raw samples `x` ``[B, ...]``, an array or a tensor, in the form of the data set.

        The scale of bytes, the range of inputs and standardisation are applied here, and real
        targets are given back in their own units. Calibrators that the run fitted adjust the
        prediction, unless `calibrated` is false. Raises `DataError` for samples of another form.
        """
        inputs, likelihood = self._inputs(x), self.problem.likelihood
        with torch.no_grad(), pool.single_threaded():  # as in evaluation: equal to the bit
            parts = [self.predictive(block) for block in inputs.split(work.BLOCK)]
        classes = self.description.classes if likelihood.task == "classification" else ()
        return prediction_of(
            parts,
            classes,
            self.problem.train.scaling,
            self._fitted(calibrated),
            likelihood.least,
        )

    @property
    def posterior(self) -> dict[str, dict[str, Tensor]]:
        """The posterior's moments or draws ``[..., *shape]``: field, then name of the parameter."""
        found, layout = self._posterior().marginals(), self.problem.layout
        whole = {name: t for name, t in found.items() if t.shape[-1] == layout.total}
        return {name: self._by_parameter(tensor) for name, tensor in whole.items()}

    def sample(self, n: int, seed: int = 0) -> list[dict[str, Tensor]]:
        """Draw the parameters `n` times from the posterior: state dicts of `module`."""
        posterior, like = self._posterior(), self.problem.initial
        draws = stream(seed, self.broadcast.round, self.number, "samples", like.device)
        noises = (torch.empty_like(like).normal_(generator=draws) for _ in range(n))
        return [self._by_parameter(posterior.sample(noise)) for noise in noises]

    def module(self) -> nn.Module:
        """Return the network at the posterior's mean, for inputs as the network gets them.

        Unlike `predict`, it does not scale its inputs, and knows no uncertainty.
        """
        network = copy.deepcopy(self.problem.network)
        network.load_state_dict(self._by_parameter(self._posterior().mean), strict=False)
        return network

    def save(self, path: Path | str) -> Path:
        """Write the model to one safetensors file with a JSON header; return its path.

        Raises `RunError` if it cannot be written.
        """
        header = {
            "format": FORMAT,
            "id": self.id,
            "number": self.number,
            "size": self.size,
            "novel": self.novel,
            "round": self.broadcast.round,
            "settings": dict(self.settings),
            "data": self.description.only(self.number).as_json(),
        }
        server = {f"broadcast.{name}": t for name, t in self.broadcast.pack().items()}
        own = {f"memory.{name}": t for name, t in self.memory.items()}
        sums = {f"{CALIBRATION}{name}": t for name, t in self.calibration.items()}
        models.save_tensors(Path(path), server | own | sums, header)
        return Path(path)

    def export(self, path: Path | str, draws: int | None = None) -> str:
        """Write a program for other runtimes, ``.pt2`` or ``.onnx``; return what it maps to what.

        It maps raw samples to probabilities, or to mean and variance, averaging the model's number
        of draws, or `draws`; columns of a table come encoded, and predictions are not calibrated.
        Raises `OptionError` where that is not how the model predicts, and
        `RunError` if the file cannot be written.
        """
        return exporting.write_program(self, Path(path), draws)

    def assuming(self, label_prior: str) -> ClientModel:
        """Return the model that predicts samples with other label frequencies.

        `label_prior`: ``client``, ``pooled`` or ``uniform`` (see `Categorical`); it is also that of
        the files that the model returned writes. Raises `OptionError` for another word, or if the
        likelihood does not count labels.
        """
        likelihood = self.problem.likelihood
        if not likelihood.counts_labels:
            raise OptionError(
                f"--label-prior: the model was trained without one (likelihood {likelihood.name}); "
                "leave it out"
            )
        changed = {"predict_label_prior": label_prior}
        problem = attrs.evolve(self.problem, likelihood=likelihood.replace(**changed))
        settings = {**self.settings, "likelihood": {**self.settings["likelihood"], **changed}}
        return attrs.evolve(self, problem=problem, settings=settings)

    def predictive(self, inputs: Tensor) -> Predictive:
        """Predict samples ``[B, ...]`` as the network gets them, before anything is averaged."""
        return self.inference.predict(self.bound, self.broadcast, self._cohort(), inputs[None])

    @property
    def bound(self) -> Problem:
        """The problem with the client's own offset, where the likelihood has one."""
        if LABEL_COUNTS not in self.memory:
            return self.problem.for_server()
        return self.problem.for_client(self._cohort(), predicting=True)

    def _fitted(self, calibrated: bool) -> tuple[Fitted, ...]:
        """Return what the predictions are calibrated with."""
        if not calibrated:
            return ()
        total = self.broadcast.calibration
        return fit(self.problem.calibrators, self.number, self.calibration, total)

    def _inputs(self, x: Any) -> Tensor:
        problem = self.problem
        # Contiguous, because a matrix product of columns differs in its last bit.
        raw = samples(x, self.description).to(problem.device, problem.initial.dtype).contiguous()
        scaling = problem.train.scaling
        return scaling.features(raw) if scaling else raw

    def _posterior(self) -> Any:
        """Return the posterior ``[P]``."""
        return self.inference.posterior(self.problem, self.broadcast, self._cohort())[0]

    def _by_parameter(self, tensor: Tensor) -> dict[str, Tensor]:
        layout, lead = self.problem.layout, tensor.shape[:-1]
        pieces = zip(layout.names, layout.shapes, tensor.split(layout.sizes, -1), strict=True)
        return {name: piece.reshape(*lead, *shape) for name, shape, piece in pieces}

    def _cohort(self) -> Cohort:
        """Return the client without samples, ready to predict."""
        problem, train = self.problem, self.problem.train
        return Cohort(
            (self.number,),
            train.x[None, :0],
            train.y[None, :0],
            (self.size,),
            {name: tensor[None] for name, tensor in self.memory.items()},
            problem.seed,
            self.broadcast.round,
            self.novel,
        )


def load_model(path: Path | str, device: str = "") -> ClientModel:
    """Return the model that `ClientModel.save` or ``bfl export`` wrote.

    Nothing is unpickled: inference, likelihood and network are rebuilt from their names and
    options, so their distributions must be installed, and a network of the user's own importable.
    `device`: that of the run, unless given. Raises `RunError` for another file.
    """
    where = Path(path)
    header, tensors, _ = models.read_tensors(where)
    if header.get("format") != FORMAT or "settings" not in header:
        raise RunError(f"{where} is not a model; allowed: a file that bfl export wrote")
    described = describing.Description.from_json(header["data"], where)
    settings = header["settings"]
    problem, inference = rebuild.rebuild(loading.load_registry(), settings, described, device)
    placed = {name: tensor.to(problem.device) for name, tensor in tensors.items()}
    family = type(inference.initial(problem))
    broadcast = Broadcast.unpack(header["round"], within(placed, "broadcast."), family)
    return ClientModel(
        header["id"],
        header["number"],
        problem.surveyed(broadcast.survey),
        inference,
        broadcast,
        within(placed, "memory."),
        described,
        settings,
        header["size"],
        header["novel"],
        within(placed, CALIBRATION),
    )
