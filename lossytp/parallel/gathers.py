"""Gather the shards of weights and activations from all processes, without losses.

Some models need all outputs of a sharded layer on every rank, for instance to normalise all queries together. Each rank
then does the same computation on whole activations.

If ranks have their own streams, a rank's columns are in its own rows, and all rows are equal after a gather. The
training loss is then the mean over the L local ranks. Gradients are L times as large where layers are sharded (as in
`lossytp.parallel.functions`), but not where each rank computes on whole activations.

Shapes:
- B is the first of any leading axes.
- There are R ranks, L of them in this process.
- O counts the columns of this process, by projection, then by rank. `widths` lists one rank's outputs of each
  projection.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.functions import with_backward
from lossytp.parallel.group import RankGroup


def all_columns(shard: Tensor, widths: tuple[int, ...], group: RankGroup) -> Tensor:
    """Return the columns of all processes in the dense order, given those of this one, (..., O)."""
    if group.process_group is None or group.processes == 1:
        return shard
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.processes)]
    dist.all_gather(shards, shard.contiguous(), group=group.plain_group)  # a lossy group would lose some of it
    here = [len(group.local) * width for width in widths]
    projections = zip(*(each.split(here, -1) for each in shards), strict=True)
    return torch.cat([piece for pieces in projections for piece in pieces], -1)


def own_columns(whole: Tensor, widths: tuple[int, ...], group: RankGroup) -> Tensor:
    """Reverse `all_columns`."""
    here = slice(group.local.start, group.local.stop)
    pieces = whole.split([group.size * width for width in widths], -1)
    return torch.cat([piece.unflatten(-1, (group.size, -1))[..., here, :].flatten(-2) for piece in pieces], -1)


def _whole(y: Tensor, widths: tuple[int, ...], collective: LossyCollective) -> Tensor:
    """Return all columns, given this process's, (B, ..., O), or each stream's, (L * B, ..., sum of `widths`)."""
    group = collective.group
    if not collective.wiring.own_streams:
        return all_columns(y, widths, group)
    pieces = y.unflatten(0, (len(group.local), -1)).split(widths, -1)
    here = torch.cat([piece.movedim(0, -2).flatten(-2) for piece in pieces], -1)
    whole = all_columns(here, widths, group)
    return whole.expand(len(group.local), *whole.shape).flatten(0, 1)


def _part(whole: Tensor, widths: tuple[int, ...], collective: LossyCollective) -> Tensor:
    """Reverse `_whole`: each stream keeps its own rank's columns."""
    group = collective.group
    if not collective.wiring.own_streams:
        return own_columns(whole, widths, group)
    streams = whole.unflatten(0, (len(group.local), -1))
    pieces = [piece.unflatten(-1, (group.size, -1)) for piece in streams.split([group.size * w for w in widths], -1)]
    return torch.cat(
        [torch.cat([piece[n, ..., rank, :] for n, rank in enumerate(group.local)]) for piece in pieces], -1
    )


def _streams(collective: LossyCollective) -> int:
    return len(collective.group.local) if collective.wiring.own_streams else 1


def gather_columns(y: Tensor, widths: tuple[int, ...], collective: LossyCollective) -> Tensor:
    """Return the columns of all ranks. Backward keeps each rank's own, since all hold the same gradient."""
    return with_backward(
        y, lambda y: _whole(y, widths, collective), lambda dy: _streams(collective) * _part(dy, widths, collective)
    )


def split_columns(x: Tensor, widths: tuple[int, ...], collective: LossyCollective) -> Tensor:
    """Return the columns of this process's ranks. Backward gathers the gradients of all ranks."""
    return with_backward(
        x, lambda x: _part(x, widths, collective), lambda dx: _whole(dx, widths, collective) / _streams(collective)
    )


def sum_gradient(parameter: Tensor, group: RankGroup) -> Tensor:
    """Return `parameter`. Backward sums its gradient over processes, since each of them sees only its own heads."""

    def total(gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        group.begin_sum_(total)()
        return total

    return with_backward(parameter, lambda parameter: parameter.view_as(parameter), total)
