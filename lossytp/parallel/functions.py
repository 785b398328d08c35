"""Define f and g, each fused with the adjacent matrix product, which saves a pass over memory.

Shoeybi et al., "Megatron-LM", 2019, section 3: f copies the input in forward and all-reduces its gradient in backward;
g all-reduces the output in forward and is the identity in backward (a sender does not learn what was lost).

There are three cases, by how the ranks hold the residual stream:
- All ranks share one stream, because all receive the same results: `SharedColumn`, `SharedRow`.
- Each rank has its own stream, because each rank's results lack different packets: `OwnColumn`, `OwnRow`. The streams
  lie one after another along the batch.
- One stream is sharded (sequence-parallel), and each rank gathers it: also `OwnColumn` and `OwnRow`. f is then an
  all-gather whose backward is a reduce-scatter, and g the reverse (Korthikanti et al., "Reducing activation
  recomputation in large transformer models", MLSys 2023, section 4.2).

If ranks have their own streams, a process's training loss is the mean over its L ranks. This mean is right for the
parameters that they share. A rank's own shard needs the gradient of its own training loss, which is L times as large.
So between g and f, gradients in backward are L times as large.

Shapes:
- T is the product of all leading axes, and D the model width.
- There are R ranks, L of them in this process.
- A layer holds P projections side by side (3 for q, k, v). Each rank computes F outputs of each projection; `widths`
  lists the F of all projections. A rank has K inputs.
- O counts the outputs of all projections. If ranks share a stream, outputs are in the dense order: by projection, then
  by rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lossytp.network.counters import Site
from lossytp.parallel.collectives import LossyCollective

Map = Callable[[Tensor], Tensor]


class SharedColumn(Function):
    """Compute f and the product after it as one dense product, because all ranks have the same input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_DO: Tensor,
        bias_O: Tensor | None,
        widths: tuple[int, ...],
        collective: LossyCollective,
        site: Site,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_DO)
        ctx.widths, ctx.collective, ctx.site = widths, collective, site
        x_TD = x.reshape(-1, x.shape[-1])
        y_TO = x_TD @ weight_DO if bias_O is None else torch.addmm(bias_O, x_TD, weight_DO)
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_DO = ctx.saved_tensors
        dy_TO = gradients[0].reshape(-1, weight_DO.shape[1])
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dy_LTO, weight_LDO = (_to_ranks(each, ctx.widths) for each in (dy_TO, weight_DO))
            parts_LTD = rank_by_rank(dy_LTO, weight_LDO.transpose(1, 2))
            total = ctx.collective.begin_sum_(parts_LTD, ctx.site)  # travels while the weight's gradient is computed
        if ctx.needs_input_grad[1]:
            dweight = x.reshape(-1, len(weight_DO)).t() @ dy_TO
        if ctx.needs_input_grad[2]:
            dbias = dy_TO.sum(0)
        if ctx.needs_input_grad[0]:
            dx = total.wait().view(x.shape)
        return dx, dweight, dbias, None, None, None


class SharedRow(Function):
    """Compute the product and g after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_LKD: Tensor, collective: LossyCollective, site: Site) -> Tensor:
        x_LTK = x.reshape(-1, *weight_LKD.shape[:2]).transpose(0, 1)
        total = collective.begin_sum_(rank_by_rank(x_LTK, weight_LKD), site)
        ctx.save_for_backward(x, weight_LKD)
        ctx.collective, ctx.lost = collective, (total.hops, total.missing)
        return total.wait().view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_LKD = ctx.saved_tensors
        dy_TD = gradients[0].reshape(-1, weight_LKD.shape[-1])
        if ctx.collective.wiring.exact_adjoint:
            dy_LTD = dy_TD.expand(len(weight_LKD), *dy_TD.shape).clone(memory_format=torch.contiguous_format)
            ctx.collective.adjoint_(dy_LTD, *ctx.lost)
            x_LTK = x.reshape(-1, *weight_LKD.shape[:2]).transpose(0, 1)
            dx_LTK = rank_by_rank(dy_LTD, weight_LKD.transpose(1, 2))
            return dx_LTK.transpose(0, 1).reshape(x.shape), rank_by_rank(x_LTK.transpose(1, 2), dy_LTD), None, None
        weight_ID = weight_LKD.view(-1, weight_LKD.shape[-1])
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = (dy_TD @ weight_ID.t()).view(x.shape)
        if ctx.needs_input_grad[1]:
            dweight = (x.reshape(-1, len(weight_ID)).t() @ dy_TD).view(weight_LKD.shape)
        return dx, dweight, None, None


class OwnColumn(Function):
    """Compute f and the product after it, each rank on its own input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_DO: Tensor,
        bias_O: Tensor | None,
        widths: tuple[int, ...],
        collective: LossyCollective,
        site: Site,
    ) -> Tensor:
        ranks_here, d_width = len(collective.group.local), x.shape[-1]
        if collective.wiring.sequence_parallel:
            forth = site._replace(direction="forward")
            x_LTD = collective.all_gather(x.contiguous(), forth, unit=d_width).reshape(ranks_here, -1, d_width)
        else:
            x_LTD = x.reshape(ranks_here, -1, d_width)
        ctx.save_for_backward(x_LTD, weight_DO)
        ctx.widths, ctx.collective, ctx.site, ctx.shape = widths, collective, site, x.shape
        y_LTO = rank_by_rank(x_LTD, _to_ranks(weight_DO, widths))
        if bias_O is not None:
            y_LTO += _to_ranks(bias_O.unsqueeze(0), widths)
        return _lay_out(y_LTO, collective, x.shape[:-1], widths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_LTD, weight_DO = ctx.saved_tensors
        dy_LTO = _take_up(gradients[0], ctx.collective, ctx.widths)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            parts_LTD = rank_by_rank(dy_LTO, _to_ranks(weight_DO, ctx.widths).transpose(1, 2))
            total = ctx.collective.begin_sum_(parts_LTD, ctx.site, unit=_unit(ctx.collective, len(weight_DO)))
        if ctx.needs_input_grad[1]:
            dweight = _from_ranks(rank_by_rank(x_LTD.transpose(1, 2), dy_LTO), ctx.widths)
        if ctx.needs_input_grad[2]:
            dbias = _from_ranks(dy_LTO.sum(1, keepdim=True), ctx.widths).view(-1)
        if ctx.needs_input_grad[0]:
            dx = total.wait().view(ctx.shape)
            if ctx.collective.wiring.own_streams:
                dx /= len(dy_LTO)
        return dx, dweight, dbias, None, None, None


class OwnRow(Function):
    """Compute the product and g after it. Each rank gets its own result, or a shard of the one result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_LKD: Tensor, collective: LossyCollective, site: Site) -> Tensor:
        ctx.save_for_backward(x, weight_LKD)
        ctx.collective, ctx.site = collective, site
        parts_LTD = rank_by_rank(_take_up(x, collective, (weight_LKD.shape[1],)), weight_LKD)
        unit = _unit(collective, weight_LKD.shape[-1])
        return collective.sum_(parts_LTD, site, unit).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_LKD = ctx.saved_tensors
        ranks_here, inputs, d_width = weight_LKD.shape
        dy = gradients[0]
        if ctx.collective.wiring.sequence_parallel:
            back = ctx.site._replace(direction="backward")
            dy_LTD = ctx.collective.all_gather(dy.contiguous(), back, unit=d_width).reshape(ranks_here, -1, d_width)
        else:
            dy_LTD = ranks_here * dy.reshape(ranks_here, -1, d_width)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx_LTK = rank_by_rank(dy_LTD, weight_LKD.transpose(1, 2))
            dx = _lay_out(dx_LTK, ctx.collective, x.shape[:-1], (inputs,))
        if ctx.needs_input_grad[1]:
            x_LTK = _take_up(x, ctx.collective, (inputs,))
            dweight = rank_by_rank(x_LTK.transpose(1, 2), dy_LTD)
        return dx, dweight, None, None


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


def own_gradient(parameter: Tensor, ranks_here: int) -> Tensor:
    """Return `parameter`. Its gradient becomes that of its own rank's loss, not of the local ranks' mean loss."""
    if ranks_here == 1:
        return parameter
    return with_backward(parameter, lambda parameter: parameter.view_as(parameter), lambda d: d * ranks_here)


def rank_by_rank(a_LTK: Tensor, b_LKD: Tensor) -> Tensor:
    """Return each local rank's product, (L, T, D). For one rank, a plain product is faster than a batched one."""
    return torch.bmm(a_LTK, b_LKD) if len(a_LTK) > 1 else torch.mm(a_LTK[0], b_LKD[0]).unsqueeze(0)


def _unit(collective: LossyCollective, d_width: int) -> int:
    """Return the unit that chunks are multiples of: a token's elements if chunks are shards of a stream, else 1."""
    return d_width if collective.wiring.sequence_parallel else 1


def _to_ranks(y_TO: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Reorder columns in the dense order, (T, O), to (L, T, O): each rank's columns of all projections together."""
    if len(set(widths)) == 1:  # one copy, no concatenation
        y_TPLF = y_TO.view(len(y_TO), len(widths), -1, widths[0])
        return y_TPLF.permute(2, 0, 1, 3).flatten(2)
    ranks_here = y_TO.shape[1] // sum(widths)
    pieces = y_TO.split([ranks_here * width for width in widths], 1)
    return torch.cat([piece.unflatten(1, (ranks_here, -1)).transpose(0, 1) for piece in pieces], 2)


def _from_ranks(y_LTO: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Reverse `_to_ranks`: return (T, O)."""
    if len(set(widths)) == 1:
        y_LTPF = y_LTO.unflatten(2, (len(widths), -1))
        return y_LTPF.permute(1, 2, 0, 3).reshape(y_LTO.shape[1], -1)
    return torch.cat([piece.transpose(0, 1).flatten(1) for piece in y_LTO.split(widths, 2)], 1)


def _lay_out(y_LTO: Tensor, collective: LossyCollective, shape: torch.Size, widths: tuple[int, ...]) -> Tensor:
    """Lay a layer's outputs out as attention and activations expect them, with leading axes `shape`.

    If ranks have their own streams, the ranks lie one after another along the batch. Otherwise all local ranks' heads
    or units lie side by side, in the dense order.
    """
    if collective.wiring.own_streams:
        return y_LTO.view(*shape, -1)
    return _from_ranks(y_LTO, widths).view(*shape, -1)


def _take_up(y: Tensor, collective: LossyCollective, widths: tuple[int, ...]) -> Tensor:
    """Reverse `_lay_out`: return (L, T, O)."""
    if collective.wiring.own_streams:
        return y.reshape(len(collective.group.local), -1, y.shape[-1])
    return _to_ranks(y.reshape(-1, y.shape[-1]), widths)
