"""Where this process's parameters lie in the dense model, whatever shards them.

A tensor-parallel layer holds some columns of each projection, or some rows; fully sharded replicas hold a run of a
parameter's elements. So checkpoints gather nothing, and another layout can put the dense tensors together.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.data_parallel import BucketedDDP, FlatFSDP
from lossytp.parallel.experts import TensorParallelExperts
from lossytp.parallel.group import Layout
from lossytp.parallel.layers import ColumnParallelLinear, Projection, RowParallelLinear, SummedGradients
from lossytp.parallel.pipeline import Stage
from lossytp.parallel.replicas import gathered, local
from lossytp.parallel.vocabulary import PARTS

Numbers = tuple[int, ...]
Copy = tuple[int, int]  # replica, and position in the tensor-parallel group: copies may have drifted apart
FIRST: Copy = (0, 0)


class Part(NamedTuple):
    """A rectangle of a process's parameter, before replicas shard it, that is a rectangle of a dense tensor."""

    name: str  # of the dense tensor, as is `shape`
    shape: Numbers
    offsets: Numbers  # where the rectangle begins in the dense tensor, or in its transpose
    here: tuple[tuple[int, int], ...]  # where it begins and ends in the process's parameter, by axis
    transposed: bool = False  # whether the process's parameter is part of the transpose
    rank: int = 0  # whose copy it is, by position in the tensor-parallel group; 0 if it is no copy
    stacked: bool = False  # whether copies lie on the first axis of the process's parameter

    def of(self, dense: Tensor) -> Tensor:
        """Return this rectangle of the dense tensor, as it lies in the process's parameter."""
        dense = dense.t() if self.transposed else dense
        dense = dense.unsqueeze(0) if self.stacked else dense
        sizes = (stop - start for start, stop in self.here)
        return dense[tuple(slice(first, first + size) for first, size in zip(self.offsets, sizes, strict=True))]

    def of_parameter(self, whole: Tensor) -> Tensor:
        """Return this rectangle of the process's parameter."""
        return whole[tuple(slice(*ends) for ends in self.here)]


class Shard(NamedTuple):
    """What a process holds of a parameter: the elements from `first` on, in row-major order, of some parts."""

    shape: Numbers  # of the parameter before replicas shard it
    first: int
    parts: tuple[Part, ...]  # where the parameter lies in the dense model
    replica: int  # whose copy it is; 0 if the replicas shard it

    def has(self, name: str, copy: Copy) -> bool:
        """Return whether it is part of a copy of a dense tensor."""
        return any((part.name, self.replica, part.rank) == (name, *copy) for part in self.parts)

    def put(self, values: Tensor, name: str, copy: Copy, dense: Tensor) -> None:
        """Write what `values` have of a copy of a dense tensor into `dense`."""
        whole, held = (values.new_zeros(self.shape, dtype=dtype) for dtype in (values.dtype, torch.bool))
        for each, value in ((whole, values.flatten()), (held, True)):
            each.view(-1)[self.first : self.first + values.numel()] = value
        for part in self.parts:
            if (part.name, self.replica, part.rank) == (name, *copy):
                there = part.of(dense)
                there.copy_(torch.where(part.of_parameter(held), part.of_parameter(whole), there))

    def take_(self, values: Tensor, dense: Callable[[Part], Tensor]) -> None:
        """Fill `values`, of this shard, from the dense tensor of each part. Padding keeps its values."""
        stop, whole = self.first + values.numel(), values.new_zeros(self.shape)
        whole.view(-1)[self.first : stop] = values.flatten()
        for part in self.parts:
            part.of_parameter(whole).copy_(part.of(dense(part)))
        values.copy_(whole.view(-1)[self.first : stop].view(values.shape))


def assembled(held: Sequence[tuple[Shard, Tensor]], name: str, copy: Copy = FIRST) -> Tensor:
    """Return a copy of a dense tensor, put together from the shards, and their values, of all processes."""
    shape = next(part.shape for shard, _ in held for part in shard.parts if part.name == name)
    dense = torch.empty(shape, dtype=held[0][1].dtype)
    for shard, values in held:
        shard.put(values, name, copy, dense)
    return dense


def dense_weights(model: nn.Module, layout: Layout, network: LossyNetwork) -> dict[str, Tensor]:
    """Return the dense parameters, put together from the first copies of all processes, on rank 0; nothing elsewhere.

    Every process must call this. One parameter is sent at a time.
    """
    mine: dict[tuple[str, ...], list[tuple[Shard, Tensor]]] = {}
    for parameter, shard in shards(model, layout):
        names = tuple(dict.fromkeys(part.name for part in shard.parts if shard.has(part.name, FIRST)))
        if names:
            mine.setdefault(names, []).append((shard, local(parameter).detach()))
    first = not dist.is_initialized() or dist.get_rank() == 0
    weights: dict[str, Tensor] = {}
    for names in sorted({names for each in gathered(list(mine), network) for names in each}):
        here = [(shard, values.cpu().clone()) for shard, values in mine.get(names, [])]
        everyones = [held for each in gathered(here, network) for held in each]
        weights |= {name: assembled(everyones, name) for name in names} if first else {}
    return weights


def shards(model: nn.Module, layout: Layout) -> list[tuple[nn.Parameter, Shard]]:
    """Return every parameter of this process, and where it lies in the dense model.

    `model` may be wrapped for data parallelism, or a stage of a pipeline.
    """
    flat = _flat_shards(model)
    modules = _dense_paths(model)
    projections: dict[int, list[str]] = {}
    for path, module in modules:
        if isinstance(module, Projection):
            projections.setdefault(id(module.layer), []).append(path)
    first_rank = layout.rank % layout.tensor_processes * (layout.tensor_parallel_size // layout.tensor_processes)
    found: dict[int, tuple[nn.Parameter, Shard]] = {}
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
                parts = _parts(projections.get(id(module), [path]), module, name, shape, first_rank)
            found[id(parameter)] = parameter, Shard(shape, first, tuple(parts), replica)
    return list(found.values())


def _dense_paths(model: Any) -> list[tuple[str, Any]]:
    if isinstance(model, DistributedDataParallel | BucketedDDP | FlatFSDP):
        model = model.module
    elif isinstance(model, Stage):
        model = model.model
    named = list(model.named_modules())
    inserted = {f"{path}.module" for path, module in named if isinstance(module, SummedGradients)}
    return [(path.removesuffix(".module") if path in inserted else path, module) for path, module in named]


def _flat_shards(model: nn.Module) -> dict[int, tuple[Numbers, int]]:
    """Return the whole shape and the first element here of each parameter that this project's FSDP shards, by id."""
    found: dict[int, tuple[Numbers, int]] = {}
    for unit in model.units if isinstance(model, FlatFSDP) else ():
        unit.free()  # so that the model holds shards
        first = -unit.each * unit.group.rank()
        for piece, shape in zip(unit.pieces, unit.shapes, strict=True):
            found[id(piece)] = tuple(shape), max(0, -first)
            first += shape.numel()
    return found


def _rows_here(parameter: Any) -> tuple[Numbers, int]:
    """Return the shape before replicas shard it, and the first element here, of a parameter or of PyTorch's DTensor.

    FSDP shards rows in equal parts. The last parts may be smaller.
    """
    shape, first_row = list(parameter.shape), 0
    if isinstance(parameter, DTensor):
        sizes = dict(zip(parameter.device_mesh.mesh_dim_names or ("dp",), parameter.placements, strict=True))
        if isinstance(placement := sizes.get("tp"), dtensor.Shard):
            shape[placement.dim] //= parameter.device_mesh["tp"].size()
        if "dp" in sizes:
            mesh = parameter.device_mesh["dp"]
            first_row = min(shape[0], -(-shape[0] // mesh.size()) * mesh.get_local_rank())
    return tuple(shape), first_row * math.prod(shape[1:])


def _parts(paths: list[str], module: Any, name: str, shape: Numbers, first_rank: int) -> Iterator[Part]:
    """Yield the parts of the parameter `name` of one of this project's layers, or of a replicated module.

    `paths` are the dense module's, or those of the linear layers that `module` computes side by side.
    """
    whole = _whole(f"{paths[0]}.{name}", shape)
    if isinstance(module, ColumnParallelLinear):
        yield from _columns(paths, module, name, shape)
    elif isinstance(module, RowParallelLinear) and name == "weight":
        group, made_of = module.collective.group, cast(Any, module.made_of)
        rows = shape[0] // len(group.local)
        yield _oriented(whole, (rows * group.size, shape[1]), (rows * group.local.start, 0), made_of[0][0] is nn.Linear)
    elif isinstance(module, PARTS):
        group = module.collective.group
        first = shape[0] // len(group.local) * group.local.start
        here = ((0, min(shape[0], module.vocabulary - first)), *whole.here[1:])  # the rest is padding
        yield whole._replace(shape=(module.vocabulary, *shape[1:]), offsets=(first, *whole.offsets[1:]), here=here)
    elif isinstance(module, TensorParallelExperts):
        yield from _of_experts(whole, module, name, shape)
    elif name in getattr(module, "per_rank", ()):
        for index in range(shape[0]):
            here = ((index, index + 1), *whole.here[1:])
            yield Part(whole.name, shape[1:], whole.offsets, here, rank=first_rank + index, stacked=True)
    else:
        yield whole._replace(rank=first_rank)


def _columns(paths: list[str], layer: Any, name: str, shape: Numbers) -> Iterator[Part]:
    """Yield the parts of a column-parallel layer: its ranks' columns of each projection."""
    group, inputs = layer.collective.group, shape[:-1]
    linear, here, dense = 0, 0, 0  # dense: columns of this linear layer that earlier projections have
    for width, copies in zip(layer.widths, layer.copies, strict=True):
        kind, outputs = layer.made_of[linear]
        whole = _whole(f"{paths[linear]}.{name}", (*inputs, outputs))
        alone = copies > 1  # each rank's columns are a part, because neighbours have the same ones
        size = width * (1 if alone else len(group.local))
        for first in group.local if alone else group.local[:1]:
            offsets = (*whole.offsets[:-1], dense + first // copies * width)
            part = _oriented(whole, whole.shape, offsets, kind is nn.Linear and bool(inputs))
            yield part._replace(here=(*whole.here[:-1], (here, here + size)))
            here += size
        dense += width * group.size // copies
        if dense == outputs:
            linear, dense = linear + 1, 0


def _of_experts(whole: Part, experts: Any, name: str, shape: Numbers) -> Iterator[Part]:
    """Yield the parts of a weight of tensor-parallel experts: for each local rank, a slice of each projection."""
    group, (axis, pieces) = experts.collective.group, experts.pieces[name]
    axis, size = axis + 1, shape[axis + 1] // pieces
    dense = (*shape[1:axis], shape[axis] * group.size, *shape[axis + 1 :])
    for index, rank in enumerate(group.local):
        for piece in range(pieces):
            here, offsets = list(whole.here), list(whole.offsets)
            here[0], here[axis] = (index, index + 1), (piece * size, (piece + 1) * size)
            offsets[axis] = (piece * group.size + rank) * size
            yield Part(whole.name, dense, tuple(offsets), tuple(here), stacked=True)


def _foreign(name: str, layer: Any, shape: Numbers, layout: Layout) -> Iterator[Part]:
    """Yield the parts of a layer of PyTorch or Megatron. Their weights (outputs, inputs) are GPT-2's transposed."""
    whole, rank, ranks = _whole(name, shape), layout.rank % layout.tensor_processes, layout.tensor_parallel_size
    if layer.row and len(shape) == 1:  # the bias
        yield whole._replace(rank=rank)
    elif layer.row:
        yield _oriented(whole, (shape[0], shape[1] * ranks), (0, shape[1] * rank), True)
    else:
        rows = shape[0] // layer.projections
        for number in range(layer.projections):
            offsets = ((number * ranks + rank) * rows, *whole.offsets[1:])
            part = _oriented(whole, (shape[0] * ranks, *shape[1:]), offsets, len(shape) == 2)
            yield part._replace(here=((number * rows, (number + 1) * rows), *whole.here[1:]))


def _whole(name: str, shape: Numbers) -> Part:
    return Part(name, shape, (0,) * len(shape), tuple((0, size) for size in shape))


def _oriented(part: Part, shape: Numbers, offsets: Numbers, transposed: bool) -> Part:
    return part._replace(shape=shape[::-1] if transposed else shape, offsets=offsets, transposed=transposed)
