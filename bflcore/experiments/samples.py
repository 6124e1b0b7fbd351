"""A few test samples that a run keeps for its report: the file ``samples.json``.

They are those of which the clients' own models are least sure, and the errors of which they are
surest. Images are kept as small pictures, of other samples only what was predicted. Whether a run
keeps any is a question of privacy: see `kept`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bflcore.data.user import OwnData
from bflcore.lazy import lazy
from bflcore.problem.metrics import entropies
from bflcore.randomness import stream

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor

    from bflcore.experiments.resolve import Experiment
    from bflcore.inference.base import LocalInference
    from bflcore.messages import Broadcast
    from bflcore.problem.base import Problem
else:
    torch = lazy("torch")
    Image = lazy("PIL.Image")

__all__ = ["FILE", "kept", "telling_samples"]

FILE = "samples.json"
EACH = 12  # samples of each kind
EXAMINED = 2000  # test samples that are looked at, of all clients together
LARGEST = 64  # pixels of a picture's longer side
LIKELIEST = 3  # classes whose probability is kept

Entry = dict[str, Any]
MemoryOf = Callable[[int], "Mapping[str, Tensor] | None"]


def kept(experiment: Experiment) -> bool:
    """Say whether a run keeps samples: of public data sets, or where the user says so."""
    asked = experiment.run.keep_samples
    public = experiment.dataset.public and not isinstance(experiment.dataset, OwnData)
    return asked == "yes" or (asked == "auto" and public)


def telling_samples(
    problem: Problem,
    inference: LocalInference,
    broadcast: Broadcast,
    clients: Sequence[int],
    memory_of: MemoryOf,
) -> dict[str, Any] | None:
    """Return the content of the file; None for a regression, or without test samples.

    `memory_of` gives the memory ``[...]`` with which a client predicts, None where it is not here.
    At most `EXAMINED` samples are predicted, as many of each client, drawn at random.
    """
    tested = [client for client in clients if problem.test.size(client)]
    if problem.likelihood.task != "classification" or not tested:
        return None
    share = max(1, EXAMINED // len(tested))
    entries: list[Entry] = []
    examined = 0
    for client in tested[:EXAMINED]:
        memory = memory_of(client)
        if memory is None:
            continue
        try:
            found = list(_predicted(problem, inference, broadcast, client, memory, share))
        except Exception:  # noqa: BLE001, S112 - a plugin may raise anything; the run has ended well
            continue
        examined += len(found)
        entries = _tell([*entries, *found])
    if not examined:
        return None
    pictured = [{**entry, "picture": _picture(problem, entry)} for entry in entries]
    return {
        "format": 1,
        "examined": examined,
        "unsure": [_plain(entry) for entry in _unsure(pictured)],
        "wrong": [_plain(entry) for entry in _wrong(pictured)],
    }


def _predicted(
    problem: Problem,
    inference: LocalInference,
    broadcast: Broadcast,
    client: int,
    memory: Mapping[str, Tensor],
    share: int,
) -> Iterator[Entry]:
    """Yield what a client's model says of some of its test samples."""
    stacked = {name: tensor[None] for name, tensor in memory.items()}
    cohort = problem.cohort([client], stacked, broadcast.round)
    bound = problem.for_client(cohort, predicting=True)
    x, y = problem.test.of(client)
    draws = stream(problem.seed, broadcast.round, client, "kept samples")
    rows = torch.randperm(len(x), generator=draws)[:share].sort().values
    with torch.no_grad():
        found = inference.predict(bound, broadcast, cohort, x[rows].clone()[None])
    p = found.mean[0].double()
    likeliest = p.topk(min(LIKELIEST, p.shape[-1]), dim=-1)
    columns = (rows, y[rows], entropies(p), likeliest.values, likeliest.indices)
    for row, label, entropy, values, classes in zip(*(c.tolist() for c in columns), strict=True):
        yield {
            "client": client,
            "sample": row,
            "label": label,
            "entropy": entropy,
            "predicted": [list(pair) for pair in zip(classes, values, strict=True)],
        }


def _tell(entries: Sequence[Entry]) -> list[Entry]:
    """Leave out the samples that are of neither kind."""
    chosen = [*_unsure(entries), *_wrong(entries)]
    return [entry for entry in entries if any(entry is one for one in chosen)]


def _unsure(entries: Iterable[Entry]) -> list[Entry]:
    """Return the samples with the largest entropy, the largest first."""
    return sorted(entries, key=lambda entry: -entry["entropy"])[:EACH]


def _wrong(entries: Iterable[Entry]) -> list[Entry]:
    """Return the errors with the largest probability of the predicted class, that first."""
    wrong = [entry for entry in entries if entry["predicted"][0][0] != entry["label"]]
    return sorted(wrong, key=lambda entry: -entry["predicted"][0][1])[:EACH]


def _plain(entry: Entry) -> Entry:
    predicted = [[label, round(p, 4)] for label, p in entry["predicted"]]
    return {**entry, "entropy": round(entry["entropy"], 4), "predicted": predicted}


def _picture(problem: Problem, entry: Entry) -> str:
    """Return a sample as a PNG in base64; empty if it is not an image of one or three colours."""
    samples = problem.test
    x = samples.x[samples.start[entry["client"]] + entry["sample"]].detach().cpu().double()
    if x.ndim != 3 or x.shape[0] not in {1, 3} or min(x.shape[1:]) < 4:
        return ""
    low, high = min(0.0, float(x.min())), max(1.0, float(x.max()))  # [0, 1], [-1, 1] or wider
    pixels = (255 * (x - low) / (high - low)).round().to(torch.uint8).permute(1, 2, 0)
    image = Image.fromarray(pixels.squeeze(-1).numpy())
    image.thumbnail((LARGEST, LARGEST))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
