"""Column- and row-parallel linear layers whose all-reduces lose packets.

Shoeybi et al., "Megatron-LM", 2019, section 3: a column-parallel layer splits its weight by outputs, a row-parallel
one by inputs. f copies the input in forward and all-reduces its gradient in backward; g all-reduces the output in
forward and is the identity in backward (a sender is not told what was lost).

Each layer holds the shards of the L ranks that live in this process, on an axis of their own, in the order of the
dense weight. So products that no packet crosses are one dense matrix product; only those that are summed over ranks
are computed rank by rank. f and g are fused with their product, which saves a pass over memory.

Shapes: ... any leading axes, T their product, D model width, R ranks, L of them in this process, P projections that
one layer holds side by side (3 for q, k, v), F outputs of one projection and rank, K inputs of one rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lossytp.network.counters import Site
from lossytp.parallel.collectives import LossyAllReduce


class ColumnParallelLinear(nn.Module):
    """y = f(x) W + b, rank r holding W[:, :, r]: (..., D) to (..., P * L * F).

    Forward: no communication. Backward: the ranks' parts of dx are all-reduced with losses, once for all P projections.

    Args:
        weight: the dense weight (D, P * R * F).
        bias: (P * R * F,).
        num_projections: P.
        collective: how the ranks all-reduce.
        layer: number of the transformer layer, for the counters.
        module: "attention" or "mlp", likewise.
    """

    sharded_over_ranks = ("weight", "bias")

    def __init__(
        self, weight: Tensor, bias: Tensor, *, num_projections: int, collective: LossyAllReduce, layer: int, module: str
    ) -> None:
        super().__init__()
        shape = (num_projections, collective.group.size, -1)
        here = collective.group.local
        shard_DPLF = weight.detach().view(len(weight), *shape)[:, :, here.start : here.stop]
        shard_PLF = bias.detach().view(shape)[:, here.start : here.stop]
        self.weight = nn.Parameter(_copy(shard_DPLF), weight.requires_grad)
        self.bias = nn.Parameter(_copy(shard_PLF), bias.requires_grad)
        self.collective = collective
        self.site = Site(layer, module, "backward")

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = _cast_for_autocast(x, self.weight, self.bias)
        with torch.autocast(x.device.type, enabled=False):
            return _CopyAndMultiply.apply(x, weight, bias, self.collective, self.site)

    def dense(self) -> tuple[Tensor, Tensor]:
        """The dense weight and bias; every process of the group must ask for them."""
        weight, bias = (_all_gather(p.detach(), self.collective, axis=p.ndim - 2) for p in (self.weight, self.bias))
        return weight.view(len(weight), -1), bias.view(-1)


class RowParallelLinear(nn.Module):
    """y = g(sum over r of x_r W_r) + b, rank r holding W[r]: (..., L * K) to (..., D).

    Forward: the ranks' products are all-reduced with losses; the bias, held by every rank, is added once, after the
    sum. Backward: no communication.

    Args: as `ColumnParallelLinear`'s, `weight` being (R * K, D) and `bias` (D,).
    """

    sharded_over_ranks = ("weight",)

    def __init__(self, weight: Tensor, bias: Tensor, *, collective: LossyAllReduce, layer: int, module: str) -> None:
        super().__init__()
        group = collective.group
        shard_LKD = weight.detach().view(group.size, -1, weight.shape[1])[group.local.start : group.local.stop]
        self.weight = nn.Parameter(_copy(shard_LKD), weight.requires_grad)
        self.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
        self.collective = collective
        self.site = Site(layer, module, "forward")

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = _cast_for_autocast(x, self.weight, self.bias)
        with torch.autocast(x.device.type, enabled=False):
            return _MultiplyAndReduce.apply(x, weight, self.collective, self.site) + bias

    def dense(self) -> tuple[Tensor, Tensor]:
        """The dense weight and bias; every process of the group must ask for them."""
        weight_RKD = _all_gather(self.weight.detach(), self.collective, axis=0)
        return weight_RKD.view(-1, weight_RKD.shape[-1]), self.bias.detach()


class _CopyAndMultiply(Function):
    """f and the product behind it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_DPLF: Tensor, bias_PLF: Tensor, collective: LossyAllReduce, site: Site
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
            weight_LDO = weight_DPLF.permute(2, 0, 1, 3).flatten(2)
            parts_LTD = _rank_by_rank(dy_LTO, weight_LDO.transpose(1, 2))
            dx, wait = ctx.collective.begin_sum_(parts_LTD, ctx.site)  # on its way while the weight's is computed
        if ctx.needs_input_grad[1]:
            dweight = (x.reshape(-1, d_width).t() @ dy_TO).view(weight_DPLF.shape)
        if ctx.needs_input_grad[2]:
            dbias = dy_TO.sum(0).view(weight_DPLF.shape[1:])
        if dx is not None:
            wait()
            dx = dx.view(x.shape)
        return dx, dweight, dbias, None, None


class _MultiplyAndReduce(Function):
    """The product and g behind it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_LKD: Tensor, collective: LossyAllReduce, site: Site) -> Tensor:
        ctx.save_for_backward(x, weight_LKD)
        x_LTK = x.reshape(-1, *weight_LKD.shape[:2]).transpose(0, 1)
        parts_LTD = _rank_by_rank(x_LTK, weight_LKD)
        return collective.sum_(parts_LTD, site).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_LKD = ctx.saved_tensors
        dy_TD = gradients[0].reshape(-1, weight_LKD.shape[-1])
        weight_ID = weight_LKD.view(-1, weight_LKD.shape[-1])
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = (dy_TD @ weight_ID.t()).view(x.shape)
        if ctx.needs_input_grad[1]:
            dweight = (x.reshape(-1, len(weight_ID)).t() @ dy_TD).view(weight_LKD.shape)
        return dx, dweight, None, None


def _rank_by_rank(a_LTK: Tensor, b_LKD: Tensor) -> Tensor:
    """The products (L, T, D) of each local rank's matrices; for one rank a plain product, which is faster."""
    return torch.bmm(a_LTK, b_LKD) if len(a_LTK) > 1 else torch.mm(a_LTK[0], b_LKD[0]).unsqueeze(0)


def _copy(shard: Tensor) -> Tensor:
    """A copy with memory of its own, so that the dense weight can be freed."""
    return shard.clone(memory_format=torch.contiguous_format)


def _all_gather(shard: Tensor, collective: LossyAllReduce, *, axis: int) -> Tensor:
    """The shards of all processes, side by side along `axis`, without losses."""
    group = collective.group
    if group.process_group is None or group.processes == 1:
        return shard
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.processes)]
    with collective.network.reliable():
        dist.all_gather(shards, shard.contiguous(), group=group.process_group)
    return torch.cat(shards, axis)


def _cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype that autocast gives a matrix product; autocast does not reach inside a Function.

    float64 stays as it is, as under autocast.
    """
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) and tensors[0].dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        return tuple(tensor.to(dtype) for tensor in tensors)
    return tensors
