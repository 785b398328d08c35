"""f and g, each fused with the adjacent matrix product, which saves a pass over memory.

Shoeybi et al., "Megatron-LM", 2019, section 3: f copies the input in forward and all-reduces its gradient in backward;
g all-reduces the output in forward and is the identity in backward (a sender does not learn what was lost).

The layout of the residual stream on the ranks makes three cases:
- one stream that all ranks share, because all have the same results: `SharedColumn`, `SharedRow`;
- a stream on each rank, because each result lacks other packets: `OwnColumn`, `OwnRow`, rank-major along the batch;
- one sharded stream (sequence-parallel), which each rank gathers for itself: also the latter two. f is then an
  all-gather whose backward is a reduce-scatter, and g the reverse (Korthikanti et al., "Reducing activation
  recomputation in large transformer models", MLSys 2023, section 4.2).

If ranks have streams of their own, a process's training loss is the mean over its L ranks. That mean suits the
parameters that they share. A rank's own shard needs the gradient of its own training loss, which is L times as large.
So between g and f, gradients in backward are L times as large.

Shapes: ... any leading axes, T their product, D model width, R ranks, L of them in this process, P projections that one
layer holds side by side (3 for q, k, v), F outputs of one projection and rank, K inputs of one rank, O = P F.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lossytp.network.counters import Site
from lossytp.parallel.collectives import LossyCollective


class SharedColumn(Function):
    """Compute f and the product after it as one dense product: no packet is lost before it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_DPLF: Tensor, bias_PLF: Tensor, collective: LossyCollective, site: Site
    ) -> Tensor:
        ctx.save_for_backward(x, weight_DPLF)
        ctx.collective, ctx.site = collective, site
        x_TD = x.reshape(-1, x.shape[-1])
        y_TO = torch.addmm(bias_PLF.view(-1), x_TD, weight_DPLF.view(len(weight_DPLF), -1))
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_DPLF = ctx.saved_tensors
        d_width, projections, ranks_here, _ = weight_DPLF.shape
        dy_TO = gradients[0].reshape(-1, weight_DPLF[0].numel())
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dy_LTO = dy_TO.view(len(dy_TO), projections, ranks_here, -1).permute(2, 0, 1, 3).flatten(2)
            parts_LTD = rank_by_rank(dy_LTO, _by_rank(weight_DPLF).transpose(1, 2))
            total = ctx.collective.begin_sum_(parts_LTD, ctx.site)  # travels while the weight's gradient is computed
        if ctx.needs_input_grad[1]:
            dweight = (x.reshape(-1, d_width).t() @ dy_TO).view(weight_DPLF.shape)
        if ctx.needs_input_grad[2]:
            dbias = dy_TO.sum(0).view(weight_DPLF.shape[1:])
        if ctx.needs_input_grad[0]:
            dx = total.wait().view(x.shape)
        return dx, dweight, dbias, None, None


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
        ctx: Any, x: Tensor, weight_DPLF: Tensor, bias_PLF: Tensor, collective: LossyCollective, site: Site
    ) -> Tensor:
        ranks_here, d_width = weight_DPLF.shape[2], x.shape[-1]
        if collective.wiring.sequence_parallel:
            forth = site._replace(direction="forward")
            x_LTD = collective.gather(x.contiguous(), forth, unit=d_width).reshape(ranks_here, -1, d_width)
        else:
            x_LTD = x.reshape(ranks_here, -1, d_width)
        ctx.save_for_backward(x_LTD, weight_DPLF)
        ctx.collective, ctx.site, ctx.shape = collective, site, x.shape
        y_LTO = rank_by_rank(x_LTD, _by_rank(weight_DPLF))
        y_LTO += bias_PLF.transpose(0, 1).reshape(ranks_here, 1, -1)
        return _lay_out(y_LTO, collective, x.shape[:-1], bias_PLF.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_LTD, weight_DPLF = ctx.saved_tensors
        d_width, projections, ranks_here, outputs = weight_DPLF.shape
        dy_LTO = _take_up(gradients[0], ctx.collective, ranks_here, projections)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            parts_LTD = rank_by_rank(dy_LTO, _by_rank(weight_DPLF).transpose(1, 2))
            total = ctx.collective.begin_sum_(parts_LTD, ctx.site, unit=_unit(ctx.collective, d_width))
        if ctx.needs_input_grad[1]:
            dweight_LDO = rank_by_rank(x_LTD.transpose(1, 2), dy_LTO)
            dweight = dweight_LDO.view(ranks_here, d_width, projections, outputs).permute(1, 2, 0, 3)
        if ctx.needs_input_grad[2]:
            dbias = dy_LTO.sum(1).view(ranks_here, projections, outputs).transpose(0, 1)
        if ctx.needs_input_grad[0]:
            dx = total.wait().view(ctx.shape)
            if ctx.collective.wiring.own_streams:
                dx /= ranks_here
        return dx, dweight, dbias, None, None


class OwnRow(Function):
    """Compute the product and g after it, with a result for each rank, or in shards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_LKD: Tensor, collective: LossyCollective, site: Site) -> Tensor:
        ctx.save_for_backward(x, weight_LKD)
        ctx.collective, ctx.site = collective, site
        parts_LTD = rank_by_rank(_take_up(x, collective, len(weight_LKD), 1), weight_LKD)
        unit = _unit(collective, weight_LKD.shape[-1])
        return collective.sum_(parts_LTD, site, unit).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_LKD = ctx.saved_tensors
        ranks_here, _, d_width = weight_LKD.shape
        dy = gradients[0]
        if ctx.collective.wiring.sequence_parallel:
            back = ctx.site._replace(direction="backward")
            dy_LTD = ctx.collective.gather(dy.contiguous(), back, unit=d_width).reshape(ranks_here, -1, d_width)
        else:
            dy_LTD = ranks_here * dy.reshape(ranks_here, -1, d_width)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx_LTK = rank_by_rank(dy_LTD, weight_LKD.transpose(1, 2))
            dx = _lay_out(dx_LTK, ctx.collective, x.shape[:-1], 1)
        if ctx.needs_input_grad[1]:
            x_LTK = _take_up(x, ctx.collective, ranks_here, 1)
            dweight = rank_by_rank(x_LTK.transpose(1, 2), dy_LTD)
        return dx, dweight, None, None


class OwnGradient(torch.autograd.Function):
    """Return the input; multiply the gradient by `ranks_here`."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, ranks_here: int) -> Tensor:
        ctx.ranks_here = ranks_here
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.ranks_here, None


def own_gradient(parameter: Tensor, ranks_here: int) -> Tensor:
    """Return `parameter` with its own rank's gradient, if the training loss is the mean over local ranks."""
    return OwnGradient.apply(parameter, ranks_here) if ranks_here > 1 else parameter


def rank_by_rank(a_LTK: Tensor, b_LKD: Tensor) -> Tensor:
    """Return the products (L, T, D) of each local rank's matrices; one rank takes a plain product, which is faster."""
    return torch.bmm(a_LTK, b_LKD) if len(a_LTK) > 1 else torch.mm(a_LTK[0], b_LKD[0]).unsqueeze(0)


def _unit(collective: LossyCollective, d_width: int) -> int:
    """Return the elements of which chunks are multiples: whole tokens if chunks are shards of a stream."""
    return d_width if collective.wiring.sequence_parallel else 1


def _by_rank(weight_DPLF: Tensor) -> Tensor:
    """Return the weight as (L, D, O)."""
    return weight_DPLF.permute(2, 0, 1, 3).flatten(2)


def _lay_out(y_LTO: Tensor, collective: LossyCollective, shape: torch.Size, projections: int) -> Tensor:
    """Return what passes between two layers as attention and activation expect it, with leading axes `shape`.

    It is rank-major if ranks have streams of their own. If not, all local ranks' heads or units lie side by side, in
    the dense order.
    """
    if collective.wiring.own_streams:
        return y_LTO.view(*shape, -1)
    ranks_here, tokens, _ = y_LTO.shape
    return y_LTO.view(ranks_here, tokens, projections, -1).permute(1, 2, 0, 3).reshape(*shape, -1)


def _take_up(y: Tensor, collective: LossyCollective, ranks_here: int, projections: int) -> Tensor:
    """Reverse `_lay_out`: return (L, T, O)."""
    if collective.wiring.own_streams:
        return y.reshape(ranks_here, -1, y.shape[-1])
    y_TPLF = y.reshape(-1, projections, ranks_here, y.shape[-1] // (projections * ranks_here))
    return y_TPLF.permute(2, 0, 1, 3).flatten(2)
