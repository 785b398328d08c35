"""Boxes of dense tensors: how a shard, whatever its shape, is part of the dense model.

`lossytp.parallel.dense_places` finds them. A box is a view of the shard's own memory, so nothing is copied.

Copies of a parameter, on several replicas or ranks, may have drifted apart. Each has a name of its own; the first one's
is the dense name.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.replicas import gathered, local

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
