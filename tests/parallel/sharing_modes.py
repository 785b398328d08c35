"""The ways in which tensor-parallel ranks may share, or not share, their activations and copies of parameters."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import lossytp as ltp
from lossytp.parallel.replicas import placed

WIRE = ltp.Wire(mtu_bytes=108)  # 64 bytes of payload: 8 elements of float64
ALGORITHMS = ["direct", "ring", "tree", "switch", "sender"]
MODES: dict[str, dict[str, Any]] = {
    "shared": {},
    "own streams": {"reliable_gather": False},
    "own copies": {"reliable_gather": False, "own_copies": True},
    "sequence": {"sequence_parallel": True},
    "sequence, lossy gather": {"sequence_parallel": True, "reliable_gather": False},
    "exact adjoint": {"exact_adjoint": True},
}
ON_OWN_STREAMS = ["own streams", "own copies"]
# the sum of "sender" reaches all ranks alike
COMBINATIONS = [
    (mode, algorithm)
    for mode in MODES
    for algorithm in ALGORITHMS
    if not (mode in ON_OWN_STREAMS and algorithm == "sender")
]


def parallel(dense: PreTrainedModel, loss_rate: float, mode: str, *, size: int = 4, seed: int = 0, **how: Any) -> Any:
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate), seed=seed, wire=WIRE)
    return ltp.parallelize(dense, network, tensor_parallel_size=size, **MODES[mode] | how)


def network_of(model: Any) -> ltp.LossyNetwork:
    return model.transformer.h[0].attn.c_attn.collective.network


def by_rank(model: PreTrainedModel, dense: PreTrainedModel, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Parameters, or gradients, in the dense model's shapes, once for each copy that ranks here have."""
    copies = {id(parameter): copies for parameter, _, copies in placed(model)}
    of = {name: copies[id(parameter)] for name, parameter in model.named_parameters()}
    shapes = {name: parameter.shape for name, parameter in dense.named_parameters()}
    return [
        {
            name: (tensors[name][rank] if of[name] > 1 else tensors[name]).reshape(shape)
            for name, shape in shapes.items()
        }
        for rank in range(max(of.values()))
    ]


def parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def fresh_gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: torch.clone(parameter.grad) for name, parameter in model.named_parameters()}
