"""Train shortly with every option of the tensor-parallel ranks' messages."""

from pathlib import Path
from typing import Any

from tests.training.parallel_runs import train

SHORT = {"tensor_parallel_size": 2, "max_steps": 4}
LOSSY = {"loss_rate": 0.1}
OWN = {"reliable_gather": False}
DRIFTING = {**OWN, "replicated_gradients": "none"}
OPTIONS: dict[str, dict[str, Any]] = {
    "own streams": OWN,
    "own streams, lossy gradients": {**OWN, "replicated_gradients": "lossy"},
    "own copies": DRIFTING,
    "own copies, resynchronised": {**DRIFTING, "resync_every": 2},
    "own streams around a ring": {**OWN, "algorithm": "ring"},
    "own streams by a tree, local": {**OWN, "algorithm": "tree", "repair": "local"},
    "shards": {"sequence_parallel": True},
    "shards, lossy gather": {"sequence_parallel": True, **OWN},
    "elements": {"control": "elements"},
    "noise": {"control": "noise"},
    "adjoint": {"exact_adjoint": True},
    "stale": {"repair": "stale"},
    "counted": {"repair": "rescale_counted"},
    "fec": {"repair": "fec(10, 8)"},
    "hadamard": {"repair": "hadamard(64)"},
    "retransmit": {"repair": "retransmit(1)"},
    "forward": {"lossy_direction": "forward"},
}


def short(folder: Path, **values: Any) -> dict[str, Any]:
    return train(folder, {**SHORT, **values})


def traffic(record: dict[str, Any]) -> dict[str, Any]:
    return record["network"]["training"]


def evaluations(record: dict[str, Any], name: str) -> list[Any]:
    return [point[name] for point in record["curves"]["eval"]]
