"""Compute norms, means and drift over processes without losses, and synchronise what drifts."""

import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.scope import Counters, Site
from lossytp.parallel.collectives import collective_of
from lossytp.parallel.group import Layout
from lossytp.parallel.layers import ColumnParallelLinear

T = TypeVar("T")


def clip_gradients_(model: nn.Module, max_norm: float | None, layout: Layout, network: LossyNetwork) -> float:
    """Scale all gradients so that their norm over all processes is at most `max_norm`; return the norm before.

    Each shard counts once, and so does each replicated parameter: the norm is that of the dense model (Pascanu et al.,
    "On the difficulty of training recurrent neural networks", ICML 2013, algorithm 1).
    """
    # by whether the parameter is sharded over tensor-parallel processes, and over data-parallel ones
    squares = torch.zeros(2, 2, dtype=torch.float64)
    gradients = []
    tied = getattr(model, "counted_by_first_stage", None)
    layers = [layer for layer in model.modules() if isinstance(layer, ColumnParallelLinear) and layer.has_copies]
    shared = {id(parameter): layer.copies_of_columns() for layer in layers for parameter in layer.parameters()}
    for parameter, axes, copies in placed(model):
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            gradients.append(gradient)
            if parameter is tied:
                continue
            squares_here = gradient.double().square() / shared.get(id(parameter), copies)
            squares[int("tp" in axes), int("dp" in axes)] += squares_here.sum().cpu()
    with network.reliable():
        squares[0] = _sum_over(layout, "tp", squares[0]) / layout.tensor_processes  # replicas may have drifted apart
        norm = _over_shards(squares, layout).sqrt().item()
    if max_norm is not None and norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / norm)
    return norm


def replica_drift(model: nn.Module, layout: Layout, network: LossyNetwork) -> float:
    """Measure the spread between copies of replicated parameters over tensor-parallel ranks and replicas.

    Returns:
        The norm of the spread, largest minus smallest value, relative to the norm of the midpoint, over all parameters
        with copies; 0 if all copies are equal.
    """
    # as above, and by spread and midpoint
    squares = torch.zeros(2, 2, 2, dtype=torch.float64)
    groups = {axis: group for axis in ("tp", "dp") if (group := layout.process_group(axis)) is not None}
    with network.reliable(), torch.no_grad():
        for parameter, axes, copies in placed(model):
            compared = groups.keys() - axes
            if copies == 1 and not compared:
                continue
            each = local(parameter) if copies > 1 else local(parameter).unsqueeze(0)
            largest, smallest = each.amax(0), each.amin(0)
            for axis in sorted(compared):
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=groups[axis])
                dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=groups[axis])
            both = (largest - smallest).double(), (largest + smallest).double() / 2
            squares[int("tp" in axes), int("dp" in axes)] += torch.stack([part.square().sum() for part in both]).cpu()
        spread, middle = _over_shards(squares, layout).sqrt().tolist()
    return float(spread / middle) if spread else 0.0


def gathered(value: Any, network: LossyNetwork) -> list[Any]:
    """Return every process's `value`, by rank, without losses."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    with network.reliable():
        dist.all_gather_object(values, value)
    return values


def on_rank_zero(decide: Callable[[], T], network: LossyNetwork) -> T:
    """Call `decide` on rank 0 only, and return its result on every process.

    If it raises, rank 0 raises the error and the others end quietly: one message is enough.
    """
    if not dist.is_initialized():
        return decide()
    answer: list[Any] = [None, False]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer = [decide(), True]
        except Exception as error:
            failure = error
    with network.reliable():
        dist.broadcast_object_list(answer)
    if failure is not None:
        raise failure
    if not answer[1]:
        sys.exit(2)
    return answer[0]


def merge_counters(network: LossyNetwork) -> None:
    """Give every process the counters of all. Traffic that several processes know counts once.

    Raises:
        ValueError: if two processes disagree on a link that both know: they lost different packets.
    """
    for state in gathered(network.counters.state_dict(), network):
        other = Counters()
        other.load_state_dict(state)
        network.counters.merge(other)


def mean_over_processes(value: float | None, network: LossyNetwork) -> float:
    """Return the mean over the processes that have a value, in float64, without losses."""
    if not dist.is_initialized():
        assert value is not None
        return value
    sum_and_count = torch.tensor([value or 0.0, float(value is not None)], dtype=torch.float64, device=_device())
    with network.reliable():
        dist.all_reduce(sum_and_count)
    total, count = sum_and_count.tolist()
    return float(total / count)


def placed(model: nn.Module) -> Iterator[tuple[nn.Parameter, set[str], int]]:
    """Yield each parameter, the axes of the layout that shard it over processes, and its number of rank copies.

    Several copies lie on the parameter's first axis.
    """
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # tied
                continue
            seen.add(id(parameter))
            axes = {"dp"} if hasattr(parameter, "sharded_over_replicas") else set()  # a piece of `FlatUnit`
            if isinstance(parameter, DTensor):
                names = parameter.device_mesh.mesh_dim_names or ()
                placements = zip(names, parameter.placements, strict=True)
                axes = {axis for axis, placement in placements if not placement.is_replicate()}
            if name in getattr(module, "sharded_over_ranks", ()):  # a tensor-parallel layer declares it
                axes.add("tp")
            yield parameter, axes, len(parameter) if name in getattr(module, "per_rank", ()) else 1


def local(tensor: Any) -> Tensor:
    """Return this process's part of a tensor, in the same memory: a DTensor's shard, else the whole tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _over_shards(squares: Tensor, layout: Layout) -> Tensor:
    squares[1] = _sum_over(layout, "tp", squares[1])
    squares[:, 1] = _sum_over(layout, "dp", squares[:, 1])
    return _sum_over(layout, "pp", squares.sum((0, 1)))


def _sum_over(layout: Layout, axis: str, values: Tensor) -> Tensor:
    group = layout.process_group(axis)
    if group is None:
        return values
    total = values.to(_device(), copy=True)
    dist.all_reduce(total, group=group)
    return total.cpu()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"  # NCCL supports no other


# Tensor-parallel ranks hold copies of replicated parameters: embeddings, norms, biases after a sum, the head. Their
# gradients differ if the ranks' streams differ, or if each copy is averaged with other data-parallel replicas over its
# own links.


GRADIENTS = Site(None, None, "backward")


def synchronise_gradients_(model: nn.Module, layout: Layout, network: LossyNetwork, *, lossy: bool = False) -> None:
    """Set every replicated parameter's gradient to the mean over tensor-parallel ranks.

    If `lossy`, their sum is one message over the network, and each rank may lack different packets of it.

    Raises:
        ValueError: if `lossy`, and ranks of this process share their copies.
    """
    gradients = [local(p.grad) for p, axes, _ in placed(model) if p.grad is not None and "tp" not in axes]
    copies = max((copies for p, axes, copies in placed(model) if "tp" not in axes), default=1)
    collective = collective_of(model)
    if lossy and collective is not None:
        if not collective.comm.own_streams or copies != len(collective.group.local):
            raise ValueError("lossy = True needs ranks with copies of their own: give own_copies = True to parallelize")
        _in_one_message_(gradients, copies, lambda each: collective.sum_(each, GRADIENTS) / collective.group.size)
    elif lossy:
        _in_one_message_(gradients, copies, lambda each: _mean(each, layout))
    else:
        with network.reliable():
            _in_one_message_(gradients, copies, lambda each: _mean(each.mean(0, keepdim=True), layout).expand_as(each))


def resynchronise_(model: nn.Module, layout: Layout, network: LossyNetwork) -> None:
    """Set every copy of a replicated parameter to the mean over tensor-parallel ranks, without losses.

    Local SGD does this with whole models (Stich, "Local SGD converges fast and communicates little", ICLR 2019). The
    optimizer's moments stay each rank's own.
    """
    with network.reliable(), torch.no_grad():
        for parameter, axes, copies in placed(model):
            if "tp" not in axes:
                each = local(parameter) if copies > 1 else local(parameter).unsqueeze(0)
                each.copy_(_mean(each.mean(0, keepdim=True), layout).expand_as(each))


def _in_one_message_(tensors: list[Tensor], copies: int, mean: Callable[[Tensor], Tensor]) -> None:
    """Replace the tensors by their `mean`, sent as one message. If `copies` > 1, the first axis holds the copies."""
    if not tensors:
        return
    sizes = [tensor.numel() // copies for tensor in tensors]
    means = mean(torch.cat([tensor.reshape(copies, -1) for tensor in tensors], 1))
    for tensor, piece in zip(tensors, means.split(sizes, 1), strict=True):
        tensor.copy_(piece.reshape(tensor.shape))


def _mean(values: Tensor, layout: Layout) -> Tensor:
    group = layout.process_group("tp")
    if group is None:
        return values
    values = values.contiguous().clone()
    dist.all_reduce(values, group=group)
    return values / layout.tensor_processes
