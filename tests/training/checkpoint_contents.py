"""Read and change what checkpoints hold."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import lossytp as ltp
from lossytp.training.checkpoint import INDEX, MARKER, read_, shapes, whole, write
from lossytp.training.files import crc32_of


def contents(folder: Path) -> dict[str, Tensor]:
    """Return the whole tensors in a checkpoint."""
    sizes = shapes(folder)
    kinds = {name: torch.uint8 if name.startswith("state of process") else torch.float32 for name in sizes}
    tensors = {name: torch.full(size, 77, dtype=kinds[name]) for name, size in sizes.items()}
    read_(folder, {name: whole(tensor) for name, tensor in tensors.items()})
    return tensors


def rewrite(folder: Path, change: Callable[[dict, dict], tuple[dict, dict]]) -> None:
    """Change the tensors and the process's own state in a checkpoint of a single process, with its checksums."""
    network, own, tensors = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.0)), "state of process 0", contents(folder)
    state = torch.load(io.BytesIO(tensors.pop(own).numpy().tobytes()), weights_only=True)
    tensors, state = change(tensors, state)
    file = io.BytesIO()
    torch.save(state, file)
    tensors[own] = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    (folder / INDEX).unlink()
    names = write(folder, {name: whole(tensor) for name, tensor in tensors.items()}, network)
    marker = json.loads((folder / MARKER).read_text())
    marker["files"] = {name: crc32_of(folder / name) for name in names}
    (folder / MARKER).write_text(json.dumps(marker))
