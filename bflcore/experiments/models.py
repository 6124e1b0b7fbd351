"""The clients' models at the end of a run: the folder ``models/`` of a run directory.

Before a client predicts, it may fine-tune, adapt or infer more from its training samples
(`LocalInference.personalise`). What that gives is stored once, after the last evaluation, so that
the models can be used without the samples: ``models/000003.safetensors`` for each client whose
memory it changed, ``models/000003.calibration.safetensors`` for each client that calibrates with
sums of its own, and ``models/index.json`` with what became of every client.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from bflcore.errors import ClientError, RunError
from bflcore.experiments.integrity import check_digest, read_json, tensor_digest, write_json
from bflcore.files import make_folder, replace_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bflcore.messages import Personalised

__all__ = ["OWN", "STORED", "Models", "read_tensors", "save_tensors"]

HEADER, DIGEST = "bflcore", "digest"  # key of the JSON text among a file's metadata; key in it
OWN, STORED = "own", "stored"  # in the index: a file of its own, or the memory of the checkpoint


class Models:
    """The memories with which the clients of one run predict."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, round: int, replies: Iterable[Personalised | ClientError]) -> None:
        """Store the memories of a round, one at a time, and the index at the end.

        Raises `WriteError` if they cannot be written.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        make_folder(self.folder)
        clients = {}
        for reply in replies:
            if isinstance(reply, ClientError):
                clients[str(reply.client)] = str(reply)
                continue
            clients[str(reply.client)] = STORED if reply.memory is None else OWN
            if reply.memory is not None:
                save_tensors(self._file(reply.client), reply.memory, {})
            if reply.calibration:
                save_tensors(self._file(reply.client, "calibration"), reply.calibration, {})
        write_json(self.folder / "index.json", {"round": round, "clients": clients})

    def index(self, round: int) -> dict[int, str]:
        """Return what became of each client's model: ``own``, ``stored``, or why it failed.

        Raises `RunError` if they are not the models of `round`.
        """
        path, step = self.folder / "index.json", "run the experiment again"
        try:
            found = read_json(path, f"without it the clients' models are incomplete; {step}")
            if found["round"] != round:
                raise RunError(
                    f"{path} is of round {found['round']}, but the checkpoint is of round {round}; "
                    f"{step}"
                )
            return {int(client): str(state) for client, state in found["clients"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{path} cannot be read ({error!r}); {step}") from None

    def read(self, client: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return the memory ``[...]`` of a client that has a file of its own."""
        return read_tensors(self._file(client), device)[1]

    def read_calibration(
        self, client: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Return a client's own calibration sums ``[...]``; empty if it uses the total."""
        file = self._file(client, "calibration")
        return read_tensors(file, device)[1] if file.exists() else {}

    def _file(self, client: int, *kind: str) -> Path:
        return self.folder / ".".join([f"{client:06d}", *kind, "safetensors"])


def save_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """Replace a safetensors file by `tensors` ``[...]`` and a JSON header; return their digest.

    Raises `WriteError` if it cannot be written.
    """
    from safetensors.torch import save_file

    # Cloned, because safetensors refuses tensors that share memory.
    whole = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    digest = tensor_digest(json.dumps(header), whole)
    with replace_file(path) as aside:
        save_file(whole, aside, {HEADER: json.dumps({**header, DIGEST: digest})})
    return digest


def read_tensors(
    path: Path, device: torch.device | str = "cpu"
) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Return the JSON header, the tensors ``[...]`` and the digest of a safetensors file.

    Raises `RunError` if it cannot be read, or if its content does not match its digest.
    """
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get(HEADER, "{}"))
            names = file.keys()  # not a mapping
            # Copied: the file's tensors begin anywhere in memory, which changes the last bit.
            tensors = {key: file.get_tensor(key).clone() for key in names}
        given = header.pop(DIGEST, None)
        digest = tensor_digest(json.dumps(header), tensors)
        check_digest(given, digest)
    except (OSError, SafetensorError, ValueError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    return header, {name: tensor.to(device) for name, tensor in tensors.items()}, digest
