"""Column- and row-parallel linear layers whose all-reduces lose packets.

Shoeybi et al., "Megatron-LM", 2019, section 3: a column-parallel layer splits its weight by outputs, a row-parallel one
by inputs.

Each layer holds the shards of the L ranks in this process, in the order of the dense weight. If ranks share a stream,
a product that is not summed over ranks is one dense matrix product. All other products are computed rank by rank, and
so are those of a row-parallel layer's backward with the exact adjoint.

Shapes: ... any leading axes, T their product, D model width, R ranks, L of them in this process, P projections that one
layer holds side by side (3 for q, k, v), F outputs of one projection on one rank (`widths` lists them), K inputs of one
rank, O outputs of all projections in this process. If ranks share a stream, outputs are in the dense order: by
projection, then by rank.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from lossytp.network.scope import LossTape, Site
from lossytp.parallel.collectives import LossyCollective, collective_of
from lossytp.parallel.group import RankGroup
from lossytp.parallel.mappings import (
    Widths,
    all_columns,
    gather_columns,
    gradient_of_sum,
    known_losses,
    own_gradient,
    split_columns,
    streams_of,
    sum_gradient,
    sum_over_copies,
    unit_of,
)

# f and g of `lossytp.parallel.mappings`, each fused with the adjacent matrix product, which saves a pass over memory.
#
# If the stream is sharded (sequence-parallel), f is an all-gather whose backward is a reduce-scatter, and g the reverse
# (Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023, section 4.2).
#
# If ranks have their own streams, these lie one after another along the batch, and a process's training loss is the
# mean over its L ranks. This mean is right for the parameters that they share. A rank's own shard needs the gradient
# of its own training loss. So between g and f, gradients in backward are L times as large.


class Column(Function):
    """Compute f and the product after it: as one dense product if all ranks share a stream, else rank by rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_DO: Tensor, bias_O: Tensor | None, widths: Widths, *where: Any) -> Tensor:
        ctx.widths, ctx.shape, (ctx.collective, ctx.site) = widths, x.shape, where
        ctx.positions = ctx.collective.network.positions
        if ctx.collective.comm.one_stream:
            inputs = x.reshape(-1, x.shape[-1])
            y_TO = inputs @ weight_DO if bias_O is None else torch.addmm(bias_O, inputs, weight_DO)
            y = y_TO.view(*x.shape[:-1], -1)
        else:
            inputs = streams_of(x, ctx.collective, ctx.site._replace(direction="forward"))
            y_LTO = rank_by_rank(inputs, _to_ranks(weight_DO, widths))
            if bias_O is not None:
                y_LTO += _to_ranks(bias_O.unsqueeze(0), widths)
            y = _lay_out(y_LTO, ctx.collective, x.shape[:-1], widths)
        ctx.save_for_backward(inputs, weight_DO)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight_DO = ctx.saved_tensors
        collective, one_stream = ctx.collective, ctx.collective.comm.one_stream
        dy_TO = gradients[0].reshape(-1, gradients[0].shape[-1])
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0] or not one_stream:
            dy_LTO = _take_up(gradients[0], collective, ctx.widths)
        if ctx.needs_input_grad[0]:
            parts_LTD = rank_by_rank(dy_LTO, _to_ranks(weight_DO, ctx.widths).transpose(1, 2))
            with collective.network.at(ctx.positions):  # the sum travels while the weight's gradient is computed
                total = collective.begin_sum_(parts_LTD, ctx.site, unit_of(collective, len(weight_DO)))
        if ctx.needs_input_grad[1] and one_stream:
            dweight = inputs.t() @ dy_TO
        elif ctx.needs_input_grad[1]:
            dweight = _from_ranks(rank_by_rank(inputs.transpose(1, 2), dy_LTO), ctx.widths)
        if ctx.needs_input_grad[2]:
            dbias = dy_TO.sum(0) if one_stream else _from_ranks(dy_LTO.sum(1, keepdim=True), ctx.widths).view(-1)
        if ctx.needs_input_grad[0]:
            with collective.network.at(ctx.positions):  # sums may lose packets on their way back, too
                dx = total.wait().view(ctx.shape)
            if collective.comm.own_streams:
                dx /= len(dy_LTO)
        return dx, dweight, dbias, None, None, None


class Row(Function):
    """Compute the product and g after it. Each rank gets the one result, its own result, or a shard of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_LKD: Tensor, collective: LossyCollective, site: Site) -> Tensor:
        ctx.save_for_backward(x, weight_LKD)
        ctx.collective, ctx.site, ctx.positions = collective, site, collective.network.positions
        parts_LTD = rank_by_rank(_take_up(x, collective, (weight_LKD.shape[1],)), weight_LKD)
        total = collective.begin_sum_(parts_LTD, site, unit_of(collective, weight_LKD.shape[-1]))
        y = total.wait().view(*x.shape[:-1], -1)
        ctx.lost = known_losses(total, collective)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_LKD = ctx.saved_tensors
        collective, comm, widths = ctx.collective, ctx.collective.comm, (weight_LKD.shape[1],)
        dx = dweight = None
        if comm.one_stream and not comm.exact_adjoint:
            dy_TD = gradients[0].reshape(-1, weight_LKD.shape[-1])
            weight_ID = weight_LKD.view(-1, weight_LKD.shape[-1])
            if ctx.needs_input_grad[0]:
                dx = (dy_TD @ weight_ID.t()).view(x.shape)
            if ctx.needs_input_grad[1]:
                dweight = (x.reshape(-1, len(weight_ID)).t() @ dy_TD).view(weight_LKD.shape)
            return dx, dweight, None, None
        dy_LTD = gradient_of_sum(gradients[0], collective, ctx.site, ctx.positions, ctx.lost)
        if ctx.needs_input_grad[0]:
            dx_LTK = rank_by_rank(dy_LTD, weight_LKD.transpose(1, 2))
            dx = _lay_out(dx_LTK, collective, x.shape[:-1], widths)
        if ctx.needs_input_grad[1]:
            dweight = rank_by_rank(_take_up(x, collective, widths).transpose(1, 2), dy_LTD)
        return dx, dweight, None, None


def rank_by_rank(a_LTK: Tensor, b_LKD: Tensor) -> Tensor:
    """Return each local rank's product, (L, T, D). For one rank, a plain product is faster than a batched one."""
    return torch.bmm(a_LTK, b_LKD) if len(a_LTK) > 1 else torch.mm(a_LTK[0], b_LKD[0]).unsqueeze(0)


def _to_ranks(y_TO: Tensor, widths: Widths) -> Tensor:
    """Reorder columns in the dense order, (T, O), to (L, T, O): each rank's columns of all projections together."""
    if len(set(widths)) == 1:  # one copy, no concatenation
        y_TPLF = y_TO.view(len(y_TO), len(widths), -1, widths[0])
        return y_TPLF.permute(2, 0, 1, 3).flatten(2)
    ranks_here = y_TO.shape[1] // sum(widths)
    pieces = y_TO.split([ranks_here * width for width in widths], 1)
    return torch.cat([piece.unflatten(1, (ranks_here, -1)).transpose(0, 1) for piece in pieces], 2)


def _from_ranks(y_LTO: Tensor, widths: Widths) -> Tensor:
    """Reverse `_to_ranks`: return (T, O)."""
    if len(set(widths)) == 1:
        y_LTPF = y_LTO.unflatten(2, (len(widths), -1))
        return y_LTPF.permute(1, 2, 0, 3).reshape(y_LTO.shape[1], -1)
    return torch.cat([piece.transpose(0, 1).flatten(1) for piece in y_LTO.split(widths, 2)], 1)


def _lay_out(y_LTO: Tensor, collective: LossyCollective, shape: torch.Size, widths: Widths) -> Tensor:
    """Lay out outputs, (*shape, O): rank after rank if ranks have their own streams, else in the dense order."""
    return (y_LTO if collective.comm.own_streams else _from_ranks(y_LTO, widths)).view(*shape, -1)


def _take_up(y: Tensor, collective: LossyCollective, widths: Widths) -> Tensor:
    if collective.comm.own_streams:
        return y.reshape(len(collective.group.local), -1, y.shape[-1])
    return _to_ranks(y.reshape(-1, y.shape[-1]), widths)


def outside_graphs(method: Callable) -> Callable:
    """Return `method`, changed so that `torch.compile` breaks its graph there: a graph would repeat one call's losses.

    Raises:
        ValueError: within `torch.export` or `torch.jit.trace`, whose graphs cannot be broken.
    """
    called_from_graph = _disable_dynamo(method)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        compiling, tracing = torch.compiler.is_compiling(), torch._C._get_tracing_state() is not None
        if tracing or (compiling and torch.compiler.is_exporting()):
            graph = "torch.export" if compiling else "torch.jit.trace"
            raise ValueError(f"{graph} would repeat one call's losses: use torch.compile, or gather(model) first")
        return (called_from_graph if compiling else method)(*args, **kwargs)

    return run


class ColumnParallelLinear(nn.Module):
    """y = f(x) W + b, each rank holding its columns of every projection: (..., D) to (..., O).

    Forward: no communication. Backward: one lossy all-reduce of the ranks' parts of dx, for all P projections. With
    `sequence_parallel` forward all-gathers x, and backward reduce-scatters.

    Args:
        in_features: number of inputs, D.
        out_features: number of outputs of the dense layer, over all ranks and projections.
        bias: whether the layer has a bias.
        dense: weight (D, out_features) and bias of the dense layer. If left out, they are drawn as `nn.Linear` draws
            them; torch's generator must then be in the same state on every process.
        widths: number of outputs of each projection in the dense layer, each a multiple of R. If left out, there is one
            projection.
        collective: how the ranks all-reduce.
        layer: number of the transformer layer, for the counters.
        module: "attention" or "mlp", for the counters.
        copies: number of neighbouring ranks that hold a copy of each head of a projection, such as a key-value head
            that the queries of several ranks share. If left out, each output belongs to one rank. Backward sums the
            gradients of the copies reliably, so they stay equal.
        gather_output: whether every rank needs the outputs of all ranks, which are gathered reliably.
    """

    sharded_over_ranks = ("weight", "bias")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        collective: LossyCollective,
        layer: int,
        module: str,
        widths: Sequence[int] | None = None,
        copies: Sequence[int] | None = None,
        gather_output: bool = False,
        dense: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        group = collective.group
        widths = [out_features] if widths is None else list(widths)
        self.copies = tuple(copies or [1] * len(widths))
        self.widths = tuple(width * each // group.size for width, each in zip(widths, self.copies, strict=True))
        dense_weight, dense_bias = _drawn(in_features, out_features, bias) if dense is None else dense

        def shard(dense: Tensor) -> nn.Parameter:
            pieces = [
                piece.unflatten(-1, (group.size // each, -1))[..., [rank // each for rank in group.local], :]
                for piece, each in zip(dense.detach().split(widths, -1), self.copies, strict=True)
            ]
            return nn.Parameter(torch.cat([piece.flatten(-2) for piece in pieces], -1), dense.requires_grad)

        self.weight = shard(dense_weight)
        self.bias = None if dense_bias is None else shard(dense_bias)
        self.collective = collective
        self.gather_output = gather_output and (group.processes > 1 or collective.comm.own_streams)
        self.site = Site(layer, module, "backward")

    @property
    def has_copies(self) -> bool:
        return max(self.copies) > 1

    def copies_of_columns(self) -> Tensor:
        """Return how many ranks hold a copy of each column of this process, (O,)."""
        widths = torch.tensor(self.widths) * len(self.collective.group.local)
        return torch.tensor(self.copies).repeat_interleave(widths).to(self.weight.device)

    @property
    def widths_out(self) -> list[int]:
        """Return the number of outputs of each projection, which `forward` returns side by side."""
        group, comm = self.collective.group, self.collective.comm
        ranks = group.size if self.gather_output else 1 if comm.own_streams else len(group.local)
        return [ranks * width for width in self.widths]

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        bias: Any = self.bias
        if self.has_copies:
            weight, bias = (
                each if each is None else sum_over_copies(each, self.widths, self.copies, self.collective.group)
                for each in (weight, bias)
            )
        x, weight, bias = cast_for_autocast(x, weight, bias)
        with torch.autocast(x.device.type, enabled=False):
            y = Column.apply(x, weight, bias, self.widths, self.collective, self.site)
            return gather_columns(y, self.widths, self.collective) if self.gather_output else y

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """Return the dense weight and bias; every process of the group must call this."""
        group = self.collective.group
        with self.collective.network.reliable():
            weight = all_columns(self.weight.detach(), self.widths, group)
            bias = None if self.bias is None else all_columns(self.bias.detach(), self.widths, group)
        return self._once(weight), None if bias is None else self._once(bias)

    def _once(self, columns: Tensor) -> Tensor:
        """Return the columns of all ranks, (..., O), without further copies."""
        if not self.has_copies:
            return columns
        size = self.collective.group.size
        pieces = columns.split([size * width for width in self.widths], -1)
        each = zip(pieces, self.copies, strict=True)
        return torch.cat([piece.unflatten(-1, (size, -1))[..., ::copies, :].flatten(-2) for piece, copies in each], -1)

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
        in_features: number of inputs of the dense layer, R * K.
        out_features: number of outputs, D.
        bias: whether the layer has a bias.
        dense: weight (R * K, D) and bias (D,) of the dense layer. If left out, they are drawn as those of
            `ColumnParallelLinear`.
        collective, layer, module: as those of `ColumnParallelLinear`.
        own_bias: whether each rank has its own copy of the bias, (L, D), which may drift from the others.
        split_input: whether every rank holds the inputs of all ranks, (..., R * K). Backward then gathers reliably.
    """

    sharded_over_ranks = ("weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        collective: LossyCollective,
        layer: int,
        module: str,
        own_bias: bool = False,
        split_input: bool = False,
        dense: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        group = collective.group
        weight, dense_bias = _drawn(in_features, out_features, bias) if dense is None else dense
        self.per_rank = ("bias",) if own_bias and dense_bias is not None else ()
        shard_LKD = weight.detach().view(group.size, -1, out_features)[group.local.start : group.local.stop]
        # with its own memory, so that the dense weight can be freed
        self.weight = nn.Parameter(shard_LKD.clone(memory_format=torch.contiguous_format), weight.requires_grad)
        self.bias = None
        if dense_bias is not None:
            copies = dense_bias.expand(len(group.local), -1) if own_bias else dense_bias
            self.bias = nn.Parameter(copies.detach().clone(), dense_bias.requires_grad)
        self.collective = collective
        self.split_input = split_input and (group.processes > 1 or collective.comm.own_streams)
        self.site = Site(layer, module, "forward")

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = cast_for_autocast(x, self.weight, self.bias)
        with torch.autocast(x.device.type, enabled=False):
            if self.split_input:
                x = split_columns(x, (weight.shape[1],), self.collective)
            y = Row.apply(x, weight, self.collective, self.site)
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


def _drawn(in_features: int, out_features: int, bias: bool) -> tuple[Tensor, Tensor | None]:
    dense = nn.Linear(in_features, out_features, bias)
    return dense.weight.t().contiguous(), dense.bias


def cast_for_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return the tensors in autocast's dtype for matrix products; autocast does not reach inside a Function.

    float64 stays, as under autocast, and so does None.
    """
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) and tensors[0].dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
    return tensors


SHARDED = (ColumnParallelLinear, RowParallelLinear)


class TensorParallelBlock:
    """A block that gradient checkpointing recomputes with the losses of its first pass.

    When checkpointing is enabled, transformers sets `_gradient_checkpointing_func` on every block, and then calls it in
    place of the block's forward.
    """

    @property
    def _gradient_checkpointing_func(self) -> Callable:
        if "_gradient_checkpointing_func" not in self.__dict__:
            raise AttributeError("gradient checkpointing was never enabled")
        checkpoint: Callable = self.__dict__["_gradient_checkpointing_func"]
        block: Any = self
        collective = collective_of(block)
        if collective is None:
            return checkpoint
        network = collective.network

        def checkpoint_with_tape(function: Callable, *args: Any, **kwargs: Any) -> Any:
            tape, positions = LossTape(), network.positions

            def run(*inputs: Any, **named: Any) -> Any:
                with network.recording(tape), network.at(positions):
                    return function(*inputs, **named)

            return checkpoint(run, *args, **kwargs)

        return checkpoint_with_tape

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Callable) -> None:
        self.__dict__["_gradient_checkpointing_func"] = checkpoint


class SummedGradients(nn.Module):
    """A replicated module between sharded layers. Processes sum the gradients of its parameters reliably."""

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.module, self.group = module, group

    def forward(self, *inputs: Any) -> Any:
        parameters = {name: sum_gradient(each, self.group) for name, each in self.module.named_parameters()}
        return functional_call(self.module, parameters, inputs)
