"""f and g, and the other maps between what one rank holds and what all ranks hold, as in Megatron's `mappings.py`.

Shoeybi et al., "Megatron-LM", 2019, section 3: f copies the input in forward and all-reduces its gradient in backward;
g all-reduces the output in forward and is the identity in backward, because a sender does not learn what was lost.

`lossytp.parallel.layers` fuses f and g with the adjacent matrix products, which is faster. `notebooks/labs` uses these.

Shapes: R ranks, L of them in this process, T tokens, D model width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lossytp.network.scope import Site
from lossytp.parallel.collectives import LossyCollective, Lost, Sum
from lossytp.parallel.group import RankGroup

Map = Callable[[Tensor], Tensor]
Widths = tuple[int, ...]  # outputs of one rank, by projection


class _WithBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.on_gradient = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.on_gradient(gradients[0]), None, None


def with_backward(x: Tensor, forward: Map, backward: Map) -> Tensor:
    """Return `forward(x)`, whose backward pass applies `backward` to the gradient."""
    y: Tensor = _WithBackward.apply(x, forward, backward)
    return y


def same(x: Tensor) -> Tensor:
    """Return `x`, as a tensor of its own for autograd."""
    return x.view_as(x)


def all_reduce(parts_LTD: Tensor, collective: LossyCollective, site: Site) -> Tensor:
    """Return the sum of all ranks' parts that the network delivers, for each rank in this process: (L, T, D)."""
    total = collective.sum_(parts_LTD.clone(memory_format=torch.contiguous_format), site)
    return total.expand_as(parts_LTD)  # if sums may be lost on their way back, each rank already has a row of its own


def copy_to_tensor_parallel_region(x_LTD: Tensor, collective: LossyCollective, site: Site) -> Tensor:
    """f: return each rank's copy of x. Backward all-reduces the ranks' gradients of x, and may lose packets.

    The training loss is the sum of the ranks' training losses.
    """
    return with_backward(x_LTD, same, lambda dx: all_reduce(dx, collective, site))


def reduce_from_tensor_parallel_region(parts_LTD: Tensor, collective: LossyCollective, site: Site) -> Tensor:
    """g: all-reduce the ranks' parts of y, and maybe lose packets. Backward copies the gradient of y to every rank."""
    return with_backward(parts_LTD, lambda parts: all_reduce(parts, collective, site), lambda dy: dy)


def f_of_layers(x: Tensor, collective: LossyCollective, site: Site) -> Tensor:
    """Return each local rank's input (L, T, D) of layers within a model, as f does. Backward all-reduces its gradient.

    If the stream is sharded, forward all-gathers and backward reduce-scatters.
    """
    comm, width, positions = collective.comm, x.shape[-1], collective.network.positions

    def backward(dx_LTD: Tensor) -> Tensor:
        parts = dx_LTD.clone(memory_format=torch.contiguous_format)
        with collective.network.at(positions):
            total = collective.sum_(parts, site._replace(direction="backward"), unit_of(collective, width))
        return (total / len(total) if comm.own_streams else total).reshape(x.shape)

    return with_backward(x, lambda x: streams_of(x, collective, site._replace(direction="forward")), backward)


def g_of_layers(parts_LTD: Tensor, collective: LossyCollective, site: Site) -> Tensor:
    """Sum the ranks' parts within a model, as g does, and maybe lose packets. Backward gives all the sum's gradient.

    Returns:
        The sum (T, D), or each local rank's result (L * T, D) if ranks have their own streams.
    """
    width, lost, positions = parts_LTD.shape[-1], [], collective.network.positions

    def forward(parts_LTD: Tensor) -> Tensor:
        parts = parts_LTD.clone(memory_format=torch.contiguous_format)
        total = collective.begin_sum_(parts, site._replace(direction="forward"), unit_of(collective, width))
        y = total.wait().view(-1, width)
        lost.extend(known_losses(total, collective))
        return y

    return with_backward(parts_LTD, forward, lambda dy: gradient_of_sum(dy, collective, site, positions, lost))


def known_losses(total: Sum, collective: LossyCollective) -> list[Lost]:
    """Return the losses that backward takes into account, of a sum that has been waited for."""
    if collective.comm.exact_adjoint:
        return [total.of_parts]
    return total.of_results if collective.comm.masked_backward else []


def gradient_of_sum(dy: Tensor, collective: LossyCollective, site: Site, positions: Any, lost: list[Lost]) -> Tensor:
    """Return the gradient of each local rank's part, (L, T, D), given that of the sum and `known_losses`."""
    with collective.network.at(positions):
        dy_LTD = streams_of(dy, collective, site._replace(direction="backward"))
    if collective.comm.own_streams:
        dy_LTD = len(dy_LTD) * dy_LTD
    elif lost:
        dy_LTD = dy_LTD.clone(memory_format=torch.contiguous_format)
    for each in lost:
        collective.adjoint_(dy_LTD, *each, in_gather=collective.comm.masked_backward)
    return dy_LTD


def streams_of(x: Tensor, collective: LossyCollective, site: Site) -> Tensor:
    """Return what each local rank has of a residual stream (..., D): (L, T, D), all-gathered if it is sharded."""
    ranks_here, width = len(collective.group.local), x.shape[-1]
    if collective.comm.one_stream:
        return x.reshape(-1, width).expand(ranks_here, -1, -1)
    if collective.comm.sequence_parallel:
        x = collective.all_gather(x.contiguous(), site, unit=width)
    return x.reshape(ranks_here, -1, width)


def unit_of(collective: LossyCollective, width: int) -> int:
    """Return the unit that chunks are multiples of: a token's elements if chunks are shards of a stream, else 1."""
    return width if collective.comm.sequence_parallel else 1


def own_gradient(parameter: Tensor, ranks_here: int) -> Tensor:
    """Return `parameter`. Its gradient becomes that of its own rank's loss, not of the local ranks' mean loss."""
    return parameter if ranks_here == 1 else with_backward(parameter, same, lambda d: d * ranks_here)


# Gather the shards of weights and activations from all processes, without losses.
#
# If ranks have their own streams, a rank's columns are in its own rows, and all rows are equal after a gather.
# Gradients are L times as large where layers are sharded (`lossytp.parallel.layers`), but not where each rank computes
# on whole activations.
#
# Shapes: B the first of any leading axes, O the columns of this process, by projection, then by rank.


def all_columns(shard: Tensor, widths: Widths, group: RankGroup) -> Tensor:
    """Return the columns of all processes in the dense order, given those of this one, (..., O)."""
    if group.processes == 1:
        return shard
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.processes)]
    dist.all_gather(shards, shard.contiguous(), group=group.plain_group)  # a lossy group would lose some of it
    here = [len(group.local) * width for width in widths]
    projections = zip(*(each.split(here, -1) for each in shards), strict=True)
    return torch.cat([piece for pieces in projections for piece in pieces], -1)


def own_columns(whole: Tensor, widths: Widths, group: RankGroup) -> Tensor:
    """Reverse `all_columns`."""
    here = slice(group.local.start, group.local.stop)
    pieces = whole.split([group.size * width for width in widths], -1)
    return torch.cat([piece.unflatten(-1, (group.size, -1))[..., here, :].flatten(-2) for piece in pieces], -1)


def _whole(y: Tensor, widths: Widths, collective: LossyCollective) -> Tensor:
    """Return all columns, given this process's, (B, ..., O), or each stream's, (L * B, ..., sum of `widths`)."""
    group = collective.group
    if not collective.comm.own_streams:
        return all_columns(y, widths, group)
    pieces = y.unflatten(0, (len(group.local), -1)).split(widths, -1)
    here = torch.cat([piece.movedim(0, -2).flatten(-2) for piece in pieces], -1)
    whole = all_columns(here, widths, group)
    return whole.expand(len(group.local), *whole.shape).flatten(0, 1)


def _part(whole: Tensor, widths: Widths, collective: LossyCollective) -> Tensor:
    """Reverse `_whole`: each stream keeps its own rank's columns."""
    group = collective.group
    if not collective.comm.own_streams:
        return own_columns(whole, widths, group)
    streams = whole.unflatten(0, (len(group.local), -1))
    pieces = [piece.unflatten(-1, (group.size, -1)) for piece in streams.split([group.size * w for w in widths], -1)]
    return torch.cat(
        [torch.cat([piece[n, ..., rank, :] for n, rank in enumerate(group.local)]) for piece in pieces], -1
    )


def gather_columns(y: Tensor, widths: Widths, collective: LossyCollective) -> Tensor:
    """Return the columns of all ranks. Backward keeps each rank's own, since all hold the same gradient."""
    streams = len(collective.group.local) if collective.comm.own_streams else 1
    return with_backward(y, lambda y: _whole(y, widths, collective), lambda dy: streams * _part(dy, widths, collective))


def split_columns(x: Tensor, widths: Widths, collective: LossyCollective) -> Tensor:
    """Return the columns of this process's ranks. Backward gathers the gradients of all ranks."""
    streams = len(collective.group.local) if collective.comm.own_streams else 1
    return with_backward(x, lambda x: _part(x, widths, collective), lambda dx: _whole(dx, widths, collective) / streams)


def sum_gradient(parameter: Tensor, group: RankGroup) -> Tensor:
    """Return `parameter`. Backward sums its gradient over processes, since each of them sees only its own heads."""

    def total(gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        group.begin_sum_(total)()
        return total

    return with_backward(parameter, same, total)


def sum_over_copies(columns: Tensor, widths: Widths, copies: tuple[int, ...], group: RankGroup) -> Tensor:
    """Return `columns` (..., O). Backward sums the gradients of columns that neighbouring ranks hold copies of.

    Each copy sees only its own rank's queries. The sum is reliable, so copies stay equal.
    """

    def total(gradient: Tensor) -> Tensor:
        pieces = list(gradient.split([len(group.local) * width for width in widths], -1))
        for number, each in enumerate(copies):
            if each > 1:
                of_ranks = pieces[number].unflatten(-1, (len(group.local), -1)).movedim(-2, 0)
                sums = group.all_rows(of_ranks).unflatten(0, (-1, each)).sum(1)
                pieces[number] = sums[[rank // each for rank in group.local]].movedim(0, -2).flatten(-2)
        return torch.cat(pieces, -1)

    return with_backward(columns, same, total)
