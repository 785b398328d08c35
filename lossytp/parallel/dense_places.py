"""Where this process's parameters lie in the dense model, whatever shards them.

A checkpoint names tensors as the dense model does, so that it can be read at another layout. Every shard is a few boxes
of dense tensors: a tensor-parallel layer holds some columns of each projection, or some rows, and fully sharded
replicas hold a run of a parameter's elements, in row-major order. So nothing is gathered to save it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from lossytp.parallel.blocks import SummedGradients
from lossytp.parallel.bucketed_ddp import BucketedDDP
from lossytp.parallel.dense_boxes import Numbers, Part, Place
from lossytp.parallel.flat_fsdp import FlatFSDP
from lossytp.parallel.group import RankGroup
from lossytp.parallel.layers import ColumnParallelLinear, Projection, RowParallelLinear
from lossytp.parallel.layout import Layout
from lossytp.parallel.stages import Stage
from lossytp.parallel.vocabulary import PARTS


def places(model: nn.Module, layout: Layout) -> list[Place]:
    """Return the place of every parameter.

    Args:
        model: as the engine of this process holds it: wrapped for data parallelism, or a stage of a pipeline.
        layout: this process's place.
    """
    flat = _flat_shards(model)
    modules = _dense_paths(model)
    projections: dict[int, list[str]] = {}
    for path, module in modules:
        if isinstance(module, Projection):
            projections.setdefault(id(module.layer), []).append(path)
    first_rank = layout.rank % layout.tensor_processes * (layout.tensor_parallel_size // layout.tensor_processes)
    found: dict[int, Place] = {}
    for path, module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in found:  # tied
                continue
            shape, first = flat.get(id(parameter)) or _rows_here(parameter)
            replica = 0 if id(parameter) in flat or isinstance(parameter, DTensor) else layout.data_index
            if isinstance(module, RowParallelLinear) and name == "weight":
                shape = (shape[0] * shape[1], shape[2])  # the ranks' rows are neighbours
            if hasattr(module, "made_of") and not isinstance(module, ColumnParallelLinear | RowParallelLinear):
                parts = _foreign(f"{path}.{name}", module, shape, layout)
            else:
                parts = tuple(_parts(projections.get(id(module), [path]), module, name, shape, first_rank))
            found[id(parameter)] = Place(parameter, shape, first, parts, replica)
    return list(found.values())


def _dense_paths(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules, and their paths in the dense model."""
    inner: Any = model
    if isinstance(model, DistributedDataParallel | BucketedDDP | FlatFSDP):
        inner = model.module
    elif isinstance(model, Stage):
        inner = model.model
    named = list(inner.named_modules())
    inserted = [f"{path}.module" for path, module in named if isinstance(module, SummedGradients)]
    return [(path.removesuffix(".module") if path in inserted else path, module) for path, module in named]


def _flat_shards(model: nn.Module) -> dict[int, tuple[Numbers, int]]:
    """Return the whole shape and the first element here of each parameter that this project's FSDP shards, by id."""
    shards: dict[int, tuple[Numbers, int]] = {}
    for unit in model.units if isinstance(model, FlatFSDP) else ():
        unit.free()  # so that the model holds shards
        first = -unit.each * unit.group.rank()
        for piece, shape in zip(unit.pieces, unit.shapes, strict=True):
            shards[id(piece)] = tuple(shape), max(0, -first)
            first += shape.numel()
    return shards


def _rows_here(parameter: Any) -> tuple[Numbers, int]:
    """Return the shape before replicas shard it, and the first element here, of a parameter or of PyTorch's DTensor.

    FSDP shards rows in equal parts. The last parts may be smaller.
    """
    shape, first_row = list(parameter.shape), 0
    if isinstance(parameter, DTensor):
        sizes = dict(zip(parameter.device_mesh.mesh_dim_names or ("dp",), parameter.placements, strict=True))
        if isinstance(placement := sizes.get("tp"), Shard):
            shape[placement.dim] //= parameter.device_mesh["tp"].size()
        if "dp" in sizes:
            mesh = parameter.device_mesh["dp"]
            first_row = min(shape[0], -(-shape[0] // mesh.size()) * mesh.get_local_rank())
    return tuple(shape), first_row * math.prod(shape[1:])


def _parts(paths: list[str], module: Any, name: str, shape: Numbers, first_rank: int) -> Iterator[Part]:
    """Yield the boxes of a parameter.

    Args:
        paths: the dense module's, or those of the linear layers that `module` computes side by side.
        module: the module that holds it.
        name: its name in the module.
        shape: its shape in this process, before replicas shard it.
        first_rank: position of this process's first rank.
    """
    whole = _whole(f"{paths[0]}.{name}", shape)
    if isinstance(module, ColumnParallelLinear):
        yield from _columns(paths, module, name, shape)
    elif isinstance(module, RowParallelLinear) and name == "weight":
        group: RankGroup = module.collective.group
        made_of: Any = module.made_of
        rows = shape[0] // len(group.local)
        yield replace(
            whole,
            shape=(rows * group.size, shape[1]),
            start=(rows * group.local.start, 0),
            transposed=made_of[0][0] is nn.Linear,
        )
    elif isinstance(module, PARTS):
        group = module.collective.group
        first = shape[0] // len(group.local) * group.local.start
        here = (slice(0, min(shape[0], module.vocabulary - first)), *whole.here[1:])  # the rest is padding
        yield replace(whole, shape=(module.vocabulary, *shape[1:]), start=(first, *whole.start[1:]), here=here)
    elif name in getattr(module, "per_rank", ()):
        for index in range(shape[0]):
            here = (slice(index, index + 1), *whole.here[1:])
            yield Part(whole.name, shape[1:], whole.start[1:], here, rank=first_rank + index, stacked=True)
    else:
        yield replace(whole, rank=first_rank)


def _foreign(name: str, layer: Any, shape: Numbers, layout: Layout) -> tuple[Part, ...]:
    """Return the boxes of a layer of PyTorch or Megatron. Their weights (outputs, inputs) are GPT-2's transposed."""
    whole, rank, ranks = _whole(name, shape), layout.rank % layout.tensor_processes, layout.tensor_parallel_size
    if layer.row and len(shape) == 1:  # the bias
        return (replace(whole, rank=rank),)
    if layer.row:
        return (replace(whole, shape=(shape[0], shape[1] * ranks), start=(0, shape[1] * rank), transposed=True),)
    rows = shape[0] // layer.projections
    return tuple(
        replace(
            whole,
            shape=(shape[0] * ranks, *shape[1:]),
            start=((number * ranks + rank) * rows, *whole.start[1:]),
            here=(slice(number * rows, (number + 1) * rows), *whole.here[1:]),
            transposed=len(shape) == 2,
        )
        for number in range(layer.projections)
    )


def _columns(paths: list[str], layer: Any, name: str, shape: Numbers) -> Iterator[Part]:
    """Yield the boxes of a column-parallel layer: its ranks' columns of each projection."""
    group, inputs = layer.collective.group, shape[:-1]
    linear, here, dense = 0, 0, 0  # dense: columns of this linear layer that earlier projections have
    for width in layer.widths:
        kind, outputs = layer.made_of[linear]
        first, mine = dense + width * group.local.start, width * len(group.local)
        yield Part(
            name=f"{paths[linear]}.{name}",
            shape=(*inputs, outputs),
            start=(*[0] * len(inputs), first),
            here=(*[slice(0, size) for size in inputs], slice(here, here + mine)),
            transposed=kind is nn.Linear and bool(inputs),
        )
        here, dense = here + mine, dense + width * group.size
        if dense == outputs:
            linear, dense = linear + 1, 0


def _whole(name: str, shape: Sequence[int]) -> Part:
    return Part(name, tuple(shape), (0,) * len(shape), tuple(slice(0, size) for size in shape))
