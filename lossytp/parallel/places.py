"""Where this process's parameters lie in the dense model, whatever shards them.

A checkpoint names tensors as the dense model does, so that it can be read at another layout. Every shard is a few boxes
of dense tensors: a tensor-parallel layer holds some columns of each projection, or some rows, and fully sharded
replicas hold a run of a parameter's elements, in row-major order. So nothing is gathered to save it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.data_parallel import BucketedDDP, FlatFSDP
from lossytp.parallel.group import Layout, RankGroup
from lossytp.parallel.layers import ColumnParallelLinear, Projection, RowParallelLinear, SummedGradients
from lossytp.parallel.pipeline import Stage
from lossytp.parallel.replicas import gathered, local
from lossytp.parallel.vocabulary import PARTS

# Boxes of dense tensors: how a shard, whatever its shape, is part of the dense model.
#
# `places` finds them. A box is a view of the shard's own memory, so nothing is copied.
#
# Copies of a parameter, on several replicas or ranks, may have drifted apart. Each has a name of its own; the first
# one's is the dense name.


Numbers = tuple[int, ...]
COPY = " of replica "


class Box(NamedTuple):
    """A box of a dense tensor of size `shape`, whose first element is at `start`, in this process's memory."""

    name: str
    copy: str
    """The suffix of a copy's name; "" for the first copy."""
    shape: Numbers
    start: Numbers
    view: Tensor

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return where it lies in the dense tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.view.shape, strict=True))


@dataclass(frozen=True)
class Part:
    """A box of a process's parameter, before replicas shard it, and where it lies in a dense one.

    Attributes:
        name: of the dense parameter.
        shape: of the dense parameter, or of its transpose.
        start: the box's first element in the dense parameter, or in its transpose.
        here: the box in the process's parameter.
        transposed: whether the process's parameter is part of the transpose.
        rank: whose copy it is, by position in the tensor-parallel group; 0 if it is no copy.
        stacked: whether copies lie on the first axis of the process's parameter.
    """

    name: str
    shape: Numbers
    start: Numbers
    here: tuple[slice, ...]
    transposed: bool = False
    rank: int = 0
    stacked: bool = False

    def box(self, start: Numbers, view: Tensor, copy: str) -> Box | None:
        """Return what this part has of `view`, a box of the process's parameter that begins at `start`."""
        ends = [(begin, begin + size) for begin, size in zip(start, view.shape, strict=True)]
        both = [
            (max(mine.start, begin), min(mine.stop, end)) for mine, (begin, end) in zip(self.here, ends, strict=True)
        ]
        if any(begin >= end for begin, end in both):
            return None
        view = view[tuple(slice(begin - s, end - s) for (begin, end), s in zip(both, start, strict=True))]
        inside = [begin - mine.start for (begin, _), mine in zip(both, self.here, strict=True)]
        if self.stacked:
            view, inside = view.squeeze(0), inside[1:]
        place = tuple(offset + more for offset, more in zip(self.start, inside, strict=True))
        if self.transposed:
            return Box(self.name, copy, self.shape[::-1], place[::-1], view.t())
        return Box(self.name, copy, self.shape, place, view)


@dataclass(frozen=True)
class Place:
    """Where an optimizer parameter lies in the dense model.

    Attributes:
        parameter: the parameter.
        shape: its shape before replicas shard it.
        first: row-major index, in that shape, of the first element of this process's shard.
        parts: its boxes before replicas shard it.
        replica: whose copy it is; 0 if the replicas shard it.
    """

    parameter: nn.Parameter
    shape: Numbers
    first: int
    parts: tuple[Part, ...]
    replica: int

    @property
    def names(self) -> list[str]:
        """Return the names of the dense parameters that it is part of."""
        return list(dict.fromkeys(part.name for part in self.parts))

    def boxes(self, values: Tensor) -> Iterator[Box]:
        """Yield the boxes of `values`: the parameter, or what the optimizer keeps in its shape."""
        elements = local(values).detach()
        for start, size in boxes_of(self.shape, self.first, self.first + elements.numel()):
            if size == self.shape:
                view = elements.view(size)
            else:
                offset = int(np.ravel_multi_index(start, self.shape)) - self.first
                view = elements.view(-1)[offset : offset + math.prod(size)].view(size)
            for part in self.parts:
                box = part.box(start, view, _copy_name(self.replica, part.rank))
                if box is not None:
                    yield box


def boxes_of(shape: Numbers, first: int, stop: int) -> list[tuple[Numbers, Numbers]]:
    """Cut the elements [first, stop) of a row-major tensor into boxes, each its first element and its size."""
    if first >= stop:
        return []
    if len(shape) == 1:
        return [((first,), (stop - first,))]
    row = math.prod(shape[1:])
    begin, end = -(-first // row), stop // row  # whole rows
    broken = [(begin - 1, first, min(stop, begin * row))] if first % row else []
    if stop % row and end >= begin:
        broken.append((end, end * row, stop))
    boxes = [
        ((index, *start), (1, *size))
        for index, one, other in broken
        for start, size in boxes_of(shape[1:], one - index * row, other - index * row)
    ]
    if begin < end:
        boxes.append(((begin, *[0] * (len(shape) - 1)), (end - begin, *shape[1:])))
    return boxes


def dense_weights(held: Sequence[Place], network: LossyNetwork) -> dict[str, Tensor]:
    """Return the dense parameters, put together from the first copies of all processes, on rank 0; nothing elsewhere.

    Every process must call this. One parameter is sent at a time.
    """
    mine: dict[str, list[Box]] = {}
    for place in held:
        for box in place.boxes(place.parameter):
            if not box.copy:
                mine.setdefault(box.name, []).append(box)
    first = not dist.is_initialized() or dist.get_rank() == 0
    weights: dict[str, Tensor] = {}
    for name in sorted({name for names in gathered(list(mine), network) for name in names}):
        boxes = [box._replace(view=box.view.cpu().clone()) for box in mine.get(name, [])]
        for box in (box for each in gathered(boxes, network) for box in each):
            if first:
                whole = weights.setdefault(name, torch.empty(box.shape, dtype=box.view.dtype))
                whole[box.slices].copy_(box.view)
    return weights


def is_first_copy(name: str) -> bool:
    """Return whether a name is that of a dense tensor, and not of a later copy."""
    return COPY not in name


def _copy_name(replica: int, rank: int) -> str:
    return f"{COPY}{replica}, rank {rank}" if replica or rank else ""


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
