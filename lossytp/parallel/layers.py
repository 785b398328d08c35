"""Column- and row-parallel linear layers whose all-reduces lose packets.

Shoeybi et al., "Megatron-LM", 2019, section 3: a column-parallel layer splits its weight by outputs, a row-parallel one
by inputs. `lossytp.parallel.functions` computes them.

Each layer holds the shards of the L ranks in this process, in the order of the dense weight. If ranks share a stream,
a product that is not summed over ranks is one dense matrix product. All other products are computed rank by rank, and
so are those of a row-parallel layer's backward with the exact adjoint.

Shapes: ... any leading axes, T their product, D model width, R ranks, L of them in this process, P projections that one
layer holds side by side (3 for q, k, v), K inputs of one rank, O outputs of all projections in this process.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lossytp.network.counters import Site
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.functions import OwnColumn, OwnRow, SharedColumn, SharedRow, own_gradient
from lossytp.parallel.gathers import all_columns, gather_columns, split_columns
from lossytp.parallel.outside_graphs import outside_graphs


class ColumnParallelLinear(nn.Module):
    """y = f(x) W + b, each rank holding its columns of every projection: (..., D) to (..., O).

    Forward: no communication. Backward: one lossy all-reduce of the ranks' parts of dx, for all P projections. With
    `sequence_parallel` forward all-gathers x, and backward reduce-scatters.

    Args:
        weight: the dense weight (D, sum of `widths`).
        bias: (sum of `widths`,), or None.
        widths: the dense number of outputs of each projection, each a multiple of R.
        collective: how the ranks all-reduce.
        layer: number of the transformer layer, for the counters.
        module: "attention" or "mlp", for the counters.
        gather_output: whether every rank needs the outputs of all ranks, which are gathered reliably.
    """

    sharded_over_ranks = ("weight", "bias")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        widths: Sequence[int],
        collective: LossyCollective,
        layer: int,
        module: str,
        gather_output: bool = False,
    ) -> None:
        super().__init__()
        group = collective.group
        self.widths = tuple(width // group.size for width in widths)

        def shard(dense: Tensor) -> nn.Parameter:
            here = slice(group.local.start, group.local.stop)
            pieces = [piece.unflatten(-1, (group.size, -1)) for piece in dense.detach().split(list(widths), -1)]
            return nn.Parameter(torch.cat([piece[..., here, :].flatten(-2) for piece in pieces], -1))

        self.weight = shard(weight).requires_grad_(weight.requires_grad)
        self.bias = None if bias is None else shard(bias).requires_grad_(bias.requires_grad)
        self.collective = collective
        self.gather_output = gather_output and (group.processes > 1 or collective.wiring.own_streams)
        self.site = Site(layer, module, "backward")

    @property
    def widths_out(self) -> list[int]:
        """Return the number of outputs of each projection, which `forward` returns side by side."""
        group, wiring = self.collective.group, self.collective.wiring
        ranks = group.size if self.gather_output else 1 if wiring.own_streams else len(group.local)
        return [ranks * width for width in self.widths]

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = cast_for_autocast(x, self.weight, self.bias)
        with torch.autocast(x.device.type, enabled=False):
            function = SharedColumn if self.collective.wiring.one_stream else OwnColumn
            y = function.apply(x, weight, bias, self.widths, self.collective, self.site)
            return gather_columns(y, self.widths, self.collective) if self.gather_output else y

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """Return the dense weight and bias; every process of the group must call this."""
        group = self.collective.group
        with self.collective.network.reliable():
            weight = all_columns(self.weight.detach(), self.widths, group)
            return weight, None if self.bias is None else all_columns(self.bias.detach(), self.widths, group)

    def __getstate__(self) -> dict[str, Any]:
        """Leave what `Projection` has computed in advance out of copies."""
        return {name: value for name, value in self.__dict__.items() if name != "computed"}


class Projection(nn.Module):
    """One of several linear layers that read the same input, such as q, k and v, and are computed as one layer.

    The projection that is called first computes all of them. The others return their part if input and weights are the
    same tensors with the same values.

    Args:
        fused: the layer that computes all. The projection with index 0 owns it.
        index: number of this projection.
    """

    def __init__(self, fused: ColumnParallelLinear, index: int) -> None:
        super().__init__()
        self.index = index
        self._layer = [fused]  # a list hides its parameters from this module
        if index == 0:
            self.fused = fused

    @property
    def layer(self) -> ColumnParallelLinear:
        """Return the layer that computes all projections."""
        return self._layer[0]

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        fused = self.layer
        given = [x, fused.weight, *([] if fused.bias is None else [fused.bias])]
        state = [torch.is_grad_enabled(), *(None if each.is_inference() else each._version for each in given)]
        computed, computed_state, parts = fused.__dict__.get("computed", ([], None, {}))
        same = state == computed_state and all(map(operator.is_, given, computed))
        if not same or self.index not in parts:
            parts = dict(enumerate(fused(x).split(fused.widths_out, -1)))
            fused.__dict__["computed"] = (given, state, parts)
        part: Tensor = parts.pop(self.index)
        if not parts:
            del fused.__dict__["computed"]  # frees the input and the outputs
        return part


class RowParallelLinear(nn.Module):
    """y = g(sum over r of x_r W_r) + b, rank r holding W[r]: (..., L * K) to (..., D).

    Forward: one lossy all-reduce of the ranks' products. Every rank holds the bias and adds it once, after the sum.
    Backward: no communication. With `sequence_parallel` forward reduce-scatters, and backward all-gathers.

    Args:
        weight: the dense weight (R * K, D).
        bias: (D,), or None.
        collective: how the ranks all-reduce.
        layer: number of the transformer layer, for the counters.
        module: "attention" or "mlp", for the counters.
        own_bias: whether each rank has its own copy of the bias, (L, D), which may drift from the others.
        split_input: whether every rank holds the inputs of all ranks, (..., R * K). Backward then gathers reliably.
    """

    sharded_over_ranks = ("weight",)

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        collective: LossyCollective,
        layer: int,
        module: str,
        own_bias: bool = False,
        split_input: bool = False,
    ) -> None:
        super().__init__()
        group = collective.group
        self.per_rank = ("bias",) if own_bias and bias is not None else ()
        shard_LKD = weight.detach().view(group.size, -1, weight.shape[1])[group.local.start : group.local.stop]
        # with its own memory, so that the dense weight can be freed
        self.weight = nn.Parameter(shard_LKD.clone(memory_format=torch.contiguous_format), weight.requires_grad)
        self.bias = None
        if bias is not None:
            copies = bias.expand(len(group.local), -1) if own_bias else bias
            self.bias = nn.Parameter(copies.detach().clone(), bias.requires_grad)
        self.collective = collective
        self.split_input = split_input and (group.processes > 1 or collective.wiring.own_streams)
        self.site = Site(layer, module, "forward")

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = cast_for_autocast(x, self.weight, self.bias)
        with torch.autocast(x.device.type, enabled=False):
            if self.split_input:
                x = split_columns(x, (weight.shape[1],), self.collective)
            function = SharedRow if self.collective.wiring.one_stream else OwnRow
            y = function.apply(x, weight, self.collective, self.site)
            if bias is None:
                return y
            if not self.per_rank:
                return y + bias
            return (y.view(len(bias), -1, y.shape[-1]) + own_gradient(bias, len(bias)).unsqueeze(1)).view(y.shape)

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """Return the dense weight and bias; every process of the group must call this."""
        weight_LKD = self.weight.detach()
        with self.collective.network.reliable():
            weight = all_columns(weight_LKD.flatten(0, 1).t(), (weight_LKD.shape[1],), self.collective.group).t()
        if self.bias is None:
            return weight, None
        return weight, (self.bias[0] if self.per_rank else self.bias).detach()


def cast_for_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return the tensors in autocast's dtype for matrix products; autocast does not reach inside a Function.

    float64 stays, as under autocast, and so does None.
    """
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) and tensors[0].dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
    return tensors
