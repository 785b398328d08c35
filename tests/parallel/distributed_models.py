"""Models spread over processes, and their parameters or gradients put together again, independently of the library.

Shapes: D model width, R ranks, P projections side by side (q, k, v), F outputs of one projection and rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import lossytp as ltp
from lossytp.parallel.data_parallel import FlatFSDP, data_parallel
from lossytp.parallel.group import Layout
from lossytp.parallel.others import parallelize_dtensor, parallelize_megatron

WIRE = ltp.Wire(mtu_bytes=108)  # 64 bytes of payload: 8 elements of float64, 16 of fp32, 32 of bfloat16
IMPLEMENTATIONS = ["lossytp", "dtensor", "megatron"]
REPLICAS = ["ddp", "fsdp", "custom ddp", "custom fsdp"]


def network(loss_rate: float, *, seed: int = 0, wire: ltp.Wire = WIRE) -> ltp.LossyNetwork:
    return ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate), seed=seed, wire=wire)


def join(lossy: ltp.LossyNetwork, **sizes: int) -> Layout:
    ltp.init_process_group(lossy)
    return Layout(**sizes, rank=dist.get_rank(), world_size=dist.get_world_size())


def spread(
    dense: PreTrainedModel,
    lossy: ltp.LossyNetwork,
    layout: Layout,
    implementation: str = "lossytp",
    replicas: Any = None,
) -> Any:
    """`dense` by an implementation of tensor parallelism, or as it is for "dense", and by one of `REPLICAS`."""
    model: Any = dense
    if implementation == "lossytp":
        size = layout.tensor_parallel_size
        model = ltp.parallelize(dense, lossy, tensor_parallel_size=size, group=layout.tensor_group())
    elif implementation == "dtensor":
        model = parallelize_dtensor(dense, layout.mesh["tp"])
    elif implementation == "megatron":
        model = parallelize_megatron(dense, layout.process_group("tp"))
    return in_replicas(model, layout, replicas) if replicas else model


def in_replicas(model: PreTrainedModel, layout: Layout, replicas: str) -> Any:
    kind: Any = replicas.removeprefix("custom ")
    return data_parallel(model, layout.mesh["dp"], kind, custom=kind != replicas)


def share(batch: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    each = len(batch["labels"]) // layout.data_parallel_size
    return {name: tensor[layout.data_index * each :][:each] for name, tensor in batch.items()}


def whole(
    model: Any,
    dense: PreTrainedModel,
    lossy: ltp.LossyNetwork,
    layout: Layout,
    implementation: str,
    part: Callable[[Tensor], Any] = lambda parameter: parameter.grad,
) -> dict[str, Tensor]:
    """A part of each parameter, its gradient or itself, gathered without losses into the dense model's shapes."""
    shapes = {name: parameter.shape for name, parameter in dense.named_parameters()}
    with lossy.reliable():
        if isinstance(model, FlatFSDP):
            parts = whole_of_pieces(model, part)
        else:
            named = model.named_parameters()
            parts = {name.removeprefix("module."): part(parameter).detach() for name, parameter in named}
        for name, tensor in parts.items():
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()
            layer, kind = name.split(".")[-2:]
            column, row = layer in ("c_attn", "c_fc"), layer == "c_proj" and kind == "weight"
            if implementation != "dense" and (column or row):
                projections = 3 if layer == "c_attn" else 1
                tensor = _dense_form(tensor, layout, implementation, column, projections)
            parts[name] = tensor.clone().view(shapes[name])
    return parts


def whole_of_pieces(model: FlatFSDP, part: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    wholes: dict[str, Tensor] = {}
    for unit in model.units:
        shard = torch.zeros_like(unit.shard)
        for here, piece in zip(unit.pieces_of(shard), unit.pieces, strict=True):
            here.copy_(part(piece).detach())
        flat_P = shard.new_empty(len(unit.flat_P))
        dist.all_gather_single(flat_P, shard, group=unit.group)
        wholes |= zip([member.name for member in unit.members], unit.views(flat_P), strict=True)
    return wholes


def _dense_form(tensor: Tensor, layout: Layout, implementation: str, column: bool, projections: int) -> Tensor:
    group, ranks = layout.process_group("tp"), layout.tensor_parallel_size
    shards = [tensor]  # DTensor has gathered them already, and virtual ranks are all here
    if implementation != "dtensor" and group is not None:
        shards = [torch.empty_like(tensor).contiguous() for _ in range(group.size())]
        dist.all_gather(shards, tensor.contiguous(), group=group)
    if implementation == "lossytp":
        if not column:
            return torch.cat(shards).flatten()
        by_projection = [shard.unflatten(-1, (projections, -1)) for shard in shards]
        return torch.cat(by_projection, -1).flatten()
    if not column:
        return torch.cat(shards, 1).t().flatten()
    by_rank = torch.cat(shards).unflatten(0, (ranks, projections, -1))  # (R, P, F), and for a weight D
    return by_rank.permute((3, 1, 0, 2) if by_rank.ndim == 4 else (1, 0, 2)).flatten()
