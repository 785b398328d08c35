"""Column- and row-parallel linear layers whose all-reduces lose packets.

Shoeybi et al., "Megatron-LM", 2019, section 3: a column-parallel layer splits its weight by outputs, a row-parallel one
by inputs. `lossytp.parallel.functions` computes them.

Each layer holds the shards of the L ranks in this process, on a separate axis, in the order of the dense weight. A
product that no packet crosses is therefore one dense matrix product; only products that are summed over ranks are
computed rank by rank.

Shapes: ... any leading axes, T their product, D model width, R ranks, L of them in this process, P projections that one
layer holds side by side (3 for q, k, v), F outputs of one projection and rank, K inputs of one rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lossytp.network.counters import Site
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.functions import OwnColumn, OwnRow, SharedColumn, SharedRow, own_gradient
from lossytp.parallel.outside_graphs import outside_graphs


class ColumnParallelLinear(nn.Module):
    """y = f(x) W + b, rank r holding W[:, :, r]: (..., D) to (..., P * L * F).

    Forward: no communication. Backward: one lossy all-reduce of the ranks' parts of dx, for all P projections. With
    `sequence_parallel` forward all-gathers x, and backward reduce-scatters.

    Args:
        weight: the dense weight (D, P * R * F).
        bias: (P * R * F,).
        num_projections: P.
        collective: how the ranks all-reduce.
        layer: number of the transformer layer, for the counters.
        module: "attention" or "mlp", for the counters.
    """

    sharded_over_ranks = ("weight", "bias")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        *,
        num_projections: int,
        collective: LossyCollective,
        layer: int,
        module: str,
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

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = _cast_for_autocast(x, self.weight, self.bias)
        with torch.autocast(x.device.type, enabled=False):
            function = SharedColumn if self.collective.wiring.one_stream else OwnColumn
            return function.apply(x, weight, bias, self.collective, self.site)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Return the dense weight and bias; every process of the group must call this."""
        weight, bias = (_all_gather(p.detach(), self.collective, axis=p.ndim - 2) for p in (self.weight, self.bias))
        return weight.view(len(weight), -1), bias.view(-1)


class RowParallelLinear(nn.Module):
    """y = g(sum over r of x_r W_r) + b, rank r holding W[r]: (..., L * K) to (..., D).

    Forward: one lossy all-reduce of the ranks' products. Every rank holds the bias and adds it once, after the sum.
    Backward: no communication. With `sequence_parallel` forward reduce-scatters, and backward all-gathers.

    Args:
        weight: the dense weight (R * K, D).
        bias: (D,).
        collective: how the ranks all-reduce.
        layer: number of the transformer layer, for the counters.
        module: "attention" or "mlp", for the counters.
        own_bias: whether each rank has its own copy of the bias, (L, D), which may drift from the others'.
    """

    sharded_over_ranks = ("weight",)

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        *,
        collective: LossyCollective,
        layer: int,
        module: str,
        own_bias: bool = False,
    ) -> None:
        super().__init__()
        group = collective.group
        self.per_rank = ("bias",) if own_bias else ()
        if own_bias:
            bias = bias.expand(len(group.local), -1)
        shard_LKD = weight.detach().view(group.size, -1, weight.shape[1])[group.local.start : group.local.stop]
        self.weight = nn.Parameter(_copy(shard_LKD), weight.requires_grad)
        self.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
        self.collective = collective
        self.site = Site(layer, module, "forward")

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = _cast_for_autocast(x, self.weight, self.bias)
        with torch.autocast(x.device.type, enabled=False):
            function = SharedRow if self.collective.wiring.one_stream else OwnRow
            y = function.apply(x, weight, self.collective, self.site)
            if not self.per_rank:
                return y + bias
            return (y.view(len(bias), -1, y.shape[-1]) + own_gradient(bias, len(bias)).unsqueeze(1)).view(y.shape)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Return the dense weight and bias; every process of the group must call this."""
        weight_RKD = _all_gather(self.weight.detach(), self.collective, axis=0)
        return weight_RKD.view(-1, weight_RKD.shape[-1]), (self.bias[0] if self.per_rank else self.bias).detach()


def _copy(shard: Tensor) -> Tensor:
    """Return a copy with its own memory, so that the dense weight can be freed."""
    return shard.clone(memory_format=torch.contiguous_format)


def _all_gather(shard: Tensor, collective: LossyCollective, *, axis: int) -> Tensor:
    """Return the shards of all processes, side by side along `axis`, without losses."""
    group = collective.group
    if group.process_group is None or group.processes == 1:
        return shard
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.processes)]
    with collective.network.reliable():
        dist.all_gather(shards, shard.contiguous(), group=group.process_group)
    return torch.cat(shards, axis)


def _cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in autocast's dtype for matrix products; autocast does not reach inside a Function.

    float64 stays, as under autocast.
    """
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) and tensors[0].dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        return tuple(tensor.to(dtype) for tensor in tensors)
    return tensors
