"""A model as one program for other runtimes: torch.export's ``.pt2``, and ONNX.

The program takes raw samples, as the data set has them: scaling is part of it. It averages a fixed
number of draws of the network's parameters, which are constants in the file: those with which the
model predicts.
"""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from bflcore.errors import OptionError, RunError
from bflcore.files import replace_file
from bflcore.options import options_of
from bflcore.problem import Problem

if TYPE_CHECKING:
    from bflcore.experiments.description import Description
    from bflcore.problem.likelihoods import Predictive
    from bflcore.problem.scaling import Scaling

__all__ = ["Program", "program_of", "write_program"]

ClientModel = Any  # `bflcore.api.ClientModel`, whose module imports this one
PROBE = 3  # samples on which a program is compared with the model, and traced


@attrs.frozen(eq=False)
class _Recording(Problem):
    """A problem that remembers with which weights ``[P]`` and buffers its network was run."""

    calls: list[tuple[nn.Module, Tensor, dict[str, Tensor]]] = attrs.field(factory=list)

    def forward(
        self, weights: Tensor, x: Tensor, buffers: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        own = {name: tensor[0].clone() for name, tensor in (buffers or {}).items()}
        self.calls.append((self.network, weights[0].clone(), own))
        return super().forward(weights, x, buffers)


class Program(nn.Module):
    """Raw samples ``[B, ...]`` to probabilities ``[B, C]``, or to mean and variance ``[B, T]``.

    `draws` ``[S, P]`` are the weights that it averages over.
    """

    draws: Tensor

    def __init__(self, model: ClientModel, calls: Sequence[tuple[Any, Tensor, Any]]) -> None:
        super().__init__()
        self._described, self._scaling = model.description, model.problem.train.scaling
        self._problem: Problem = attrs.evolve(model.bound, network=calls[0][0])
        self._masks = {
            name: torch.stack([own[name] for _, _, own in calls]) for name in calls[0][2]
        }
        self.register_buffer("draws", torch.stack([weights for _, weights, _ in calls]))

    def forward(self, x: Tensor) -> Any:
        """Return probabilities ``[B, C]``, or mean and variance ``[B, T]``, of ``[B, ...]``."""
        found = self.predictive(_scaled(x, self._described, self._scaling, self.draws.dtype))
        draws = found.draws[0]
        if found.noise is None:
            return draws.mean(0)
        noise = found.noise[0] if found.noise.ndim else found.noise
        mean, variance = draws.mean(0), draws.var(0, correction=0) + noise
        if self._scaling is not None and self._scaling.y is not None:
            centre, unit = self._scaling.y
            mean, variance = mean * unit + centre, variance * unit.square()
        return mean, variance

    def predictive(self, inputs: Tensor) -> Predictive:
        """Predict samples ``[B, ...]`` as the network gets them, with every draw."""
        each = inputs.expand(len(self.draws), *inputs.shape)
        outputs = self._problem.forward(self.draws, each, self._masks)
        return self._problem.likelihood.predictive(outputs[None])


def _scaled(
    x: Tensor, described: Description, scaling: Scaling | None, dtype: torch.dtype
) -> Tensor:
    """Return raw samples ``[B, ...]`` as the network gets them."""
    x = x / described.byte if described.byte else x
    x = (2 * x - 1 if described.input_range == "-1,1" else x).to(dtype)
    return scaling.features(x) if scaling else x


def _probe(described: Description) -> Tensor:
    """Return some raw samples ``[B, ...]`` of the data's form: bytes, or numbers from 0 to 1."""
    x = torch.linspace(0, 1, PROBE * math.prod(described.shape)).reshape(PROBE, *described.shape)
    return x if described.byte is None else (x * described.byte).to(torch.uint8)


def program_of(model: ClientModel, draws: int | None = None) -> Program:
    """Return the program that predicts as `model` does, with its number of draws or with `draws`.

    Raises `OptionError` for a prediction that is not an average over draws of network weights.
    """
    inference = model.inference
    if draws is not None:
        if draws < 1:
            raise OptionError(f"--draws: {draws} is not allowed; allowed: at least 1")
        if "predict_draws" not in {option.name for option in options_of(type(inference))}:
            raise OptionError(
                f"--draws: inference {inference.name} always predicts with the same networks; "
                "leave it out"
            )
        inference = inference.replace(predict_draws=draws)
    fields = {field.name: getattr(model.problem, field.name) for field in attrs.fields(Problem)}
    recording = _Recording(**fields)
    alone = attrs.evolve(model, problem=recording, inference=inference)
    described, scaling = model.description, model.problem.train.scaling
    probe = _scaled(_probe(described), described, scaling, model.problem.initial.dtype)
    with torch.no_grad():
        found = alone.predictive(probe)
        program = Program(model, recording.calls) if recording.calls else None
        if program is None or not _same(found, program.predictive(probe)):
            raise OptionError(
                f"inference {inference.name} does not predict with draws of network weights, so a "
                "program cannot hold its predictions; write a .safetensors file, which bfl predict "
                "reads"
            )
    return program.eval()


def _same(found: Predictive, made: Predictive) -> bool:
    if found.closed_form is not None or found.draws.shape != made.draws.shape:
        return False
    pairs = [(found.draws, made.draws)]
    if found.noise is not None and made.noise is not None:
        pairs.append(
            (found.noise.expand_as(found.draws[:, 0]), made.noise.expand_as(found.draws[:, 0]))
        )
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in pairs)


def write_program(model: ClientModel, path: Path, draws: int | None = None) -> str:
    """Write the program of a model, in the format of the suffix; say in one line what it takes.

    Raises `OptionError` for a model that it cannot hold, `RunError` if it cannot be written.
    """
    if path.suffix == ".onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise RunError("a .onnx file needs onnx and onnxscript: pip install 'bflcore[onnx]'")
    program = program_of(model, draws)
    described = model.description
    probe, classification = _probe(described), described.task == "classification"
    outputs = ("probabilities",) if classification else ("mean", "variance")
    card: dict[str, Any] = {
        "format": "bflcore program 1",
        "id": model.id,
        "method": model.settings["method"],
        "draws": len(program.draws),
        "classes": list(described.classes),
        "input": {"type": str(probe.dtype).removeprefix("torch."), "shape": list(described.shape)},
        "outputs": list(outputs),
        "features": list(described.schema.features) if described.schema else [],
        "uncalibrated": [one.name for one in model.problem.calibrators],
    }
    with torch.no_grad(), _quietly():
        dynamic = ({0: torch.export.Dim("batch")},)
        exported = torch.export.export(program, (probe,), dynamic_shapes=dynamic, strict=False)
        content = (_onnx if path.suffix == ".onnx" else _pt2)(exported, card)
    with replace_file(path, "--to: ") as aside:
        aside.write_bytes(content)
    shape = ", ".join(map(str, ("batch", *described.shape)))
    averaged = "1 network" if len(program.draws) == 1 else f"{len(program.draws)} draws averaged"
    said = f"x {card['input']['type']} [{shape}] -> {', '.join(outputs)}; {averaged}"
    if card["features"]:
        said += f"; x has encoded columns: {', '.join(card['features'])}"
    if card["uncalibrated"]:
        said += f"; without the run's calibration ({', '.join(card['uncalibrated'])})"
    return said


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence what the exporters say about themselves."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _pt2(exported: Any, card: Mapping[str, Any]) -> bytes:
    content = io.BytesIO()
    torch.export.save(exported, content, extra_files={"bflcore.json": json.dumps(card)})
    return content.getvalue()


def _onnx(exported: Any, card: Mapping[str, Any]) -> bytes:
    made = torch.onnx.export(exported, input_names=["x"], dynamo=True, verbose=False)
    assert made is not None, "with dynamo, a program is returned"  # noqa: S101
    for node in made.model.graph.all_nodes():  # an operation may have called its result `mean`
        for value in node.outputs:
            value.name = f"{value.name}_inside"
    for value, name in zip(made.model.graph.outputs, card["outputs"], strict=True):
        value.name = name
    made.model.metadata_props["bflcore"] = json.dumps(card)
    content: bytes = made.model_proto.SerializeToString()
    return content
