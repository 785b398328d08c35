"""Data parallelism by DDP and FSDP, PyTorch's or this project's: replicas see different examples and average gradients.

Li et al., "PyTorch Distributed", VLDB 2020; Zhao et al., "PyTorch FSDP", VLDB 2023. Over the backend `lossy`, DDP loses
packets in its all-reduce of gradients, and FSDP in its all-gather of parameters and reduce-scatter of gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lossytp.network.checks import refuse_if
from lossytp.parallel.plans import blocks_of, draw_, values_of

DataParallelType = Literal["ddp", "fsdp"]


def data_parallel(
    model: PreTrainedModel, mesh: DeviceMesh, kind: DataParallelType, *, custom: bool = False
) -> nn.Module:
    """Return `model` as one of the replicas along the 1-D `mesh`. Call the result instead of `model`.

    Args:
        model: the model, on its device, or deferred. FSDP moves it there from the CPU, block by block.
        mesh: the replicas.
        kind: "ddp" replicates the parameters, "fsdp" shards them, block by block.
        custom: whether to use this project's code in place of PyTorch's. PyTorch's FSDP2 changes `model` itself, the
            others wrap it.
    """
    copies = kind == "fsdp" and any(getattr(layer, "has_copies", False) for layer in model.modules())
    fix = f"give 'ddp', or tensor_parallel_size = {getattr(model.config, 'num_key_value_heads', 1)} or less"
    refuse_if(copies, "data_parallel_type", kind, f"does not work where ranks hold copies of key-value heads: {fix}")
    if custom and kind == "fsdp":
        return FlatFSDP(model, mesh.get_group(), blocks=blocks_of(model))
    if custom:
        return BucketedDDP(model, mesh.get_group())
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    sharded: Any = fully_shard
    for part in (*blocks_of(model), model):
        draw_(part)
        sharded(part, mesh=mesh)
    return model


class _Replica(nn.Module):
    """One of the replicas of `module`: act at the end of each backward, and start again after one that failed."""

    _missing: Callable[[], list[str]]  # names of parameters without a gradient, in an order that all replicas share
    _reset: Callable[[], None]  # wait for the messages under way, and make ready for the next backward

    def __init__(self, module: nn.Module, process_group: ProcessGroup) -> None:
        super().__init__()
        self.module, self.process_group = module, process_group
        self._in_backward = False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._in_backward:  # the last one failed
            self._reset()
        return self.module(*inputs, **named)

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        missing = self._missing()
        self._reset()
        if missing:
            which = f"backward gave no gradient to {len(missing)} parameters, such as {missing[0]}"
            raise RuntimeError(f"{which}: freeze what the training loss does not use, with requires_grad_(False)")


# Backward reaches the last layers first. So the gradients lie in buckets in reverse order, and each bucket is summed
# over the replicas as soon as its gradients are there:
#
#     backward   last layer ................................. first layer
#     bucket 0   [gradients]---- all-reduce ---->
#     bucket 1              [gradients]---- all-reduce ---->
#     bucket 2                         [gradients]---- all-reduce ---->
#                                                             | wait for all


FIRST_BUCKET_BYTES = 2**20  # small, so that the first message leaves early; as in PyTorch
BUCKET_BYTES = 25 * 2**20


class Bucket:
    """Gradients of some parameters, all of one dtype, that travel in one message, side by side in `flat`."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        first = next(iter(parameters.values()))
        sizes = [parameter.numel() for parameter in parameters.values()]
        self.flat = first.new_zeros(sum(sizes))
        pieces = zip(parameters.items(), self.flat.split(sizes), strict=True)
        self.views = {name: piece.view_as(parameter) for (name, parameter), piece in pieces}
        self.missing = set(self.views)  # gradients that this backward has not computed yet
        self.work: Work | None = None  # the all-reduce under way


class BucketedDDP(_Replica):
    """Replicas of `module` that see different examples and train on the mean of their gradients.

    Call it instead of `module`. After `backward()` every replica holds the same gradients. Every parameter that is not
    frozen must get a gradient in each backward.

    Args:
        module: the model, on its device; the first replica's parameters and buffers replace the others'.
        process_group: the replicas.
        bucket_bytes: largest size of a message; one parameter may exceed it. The first message is smaller.
    """

    def __init__(self, module: nn.Module, process_group: ProcessGroup, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(module, process_group)
        self.averages = True
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=process_group)
        trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.buckets = [Bucket(parameters) for parameters in _filled(reversed(trained), bucket_bytes)]
        self._sent: list[Bucket] = []
        for bucket in self.buckets:
            for name in bucket.views:
                hook = partial(self._take_gradient, bucket, name)
                module.get_parameter(name).register_post_accumulate_grad_hook(hook)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let `backward()` within the block add up this replica's gradients; the next one outside averages the sum."""
        averaged, self.averages = self.averages, False
        try:
            yield
        finally:
            self.averages = averaged

    def _take_gradient(self, bucket: Bucket, name: str, parameter: nn.Parameter) -> None:
        """Move a gradient into its bucket, and send the buckets that are full, in the same order on all replicas."""
        if not self.averages:
            return
        self._begin_backward()
        assert parameter.grad is not None
        torch.mul(parameter.grad, 1 / self.process_group.size(), out=bucket.views[name])
        parameter.grad = bucket.views[name]
        bucket.missing.remove(name)
        for ready in self.buckets[len(self._sent) :]:
            if ready.missing:
                break
            ready.work = dist.all_reduce(ready.flat, group=self.process_group, async_op=True)
            self._sent.append(ready)

    def _missing(self) -> list[str]:
        return [name for bucket in self.buckets for name in sorted(bucket.missing)]

    def _reset(self) -> None:
        for bucket in self._sent:
            assert bucket.work is not None
            bucket.work.wait()
        for bucket in self.buckets:
            bucket.missing, bucket.work = set(bucket.views), None
        self._in_backward, self._sent = False, []


def _filled(parameters: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[dict[str, nn.Parameter]]:
    """Return the parameters in order, in groups of one dtype and at most `bucket_bytes`."""
    groups: list[dict[str, nn.Parameter]] = []
    room, dtype = 0, None
    for name, parameter in parameters:
        if parameter.nbytes > room or parameter.dtype != dtype:
            room, dtype = bucket_bytes if groups else min(bucket_bytes, FIRST_BUCKET_BYTES), parameter.dtype
            groups.append({})
        groups[-1][name] = parameter
        room -= parameter.nbytes
    return groups


# Zhao et al., section 3; Rajbhandari et al., "ZeRO", SC 2020, stage 3. The parameters fall into units: those of each
# transformer block, and the rest.
#
#     forward    gather the first block, compute, free; gather the second block, compute, free; ...
#     backward   gather the last block, compute its gradients, free, reduce-scatter them; then the block before; ...
#     optimizer  each replica updates its shards
#
# While one block computes, the next one's gather and the previous one's reduce-scatter run. The rest, such as the
# embeddings, stays gathered from the beginning of forward to the end of backward, as in PyTorch.


class Member(NamedTuple):
    """A parameter's name in the model, and the modules that hold it: several if it is tied."""

    name: str
    modules: list[tuple[nn.Module, str]]


class FlatUnit:
    """Parameters side by side in a vector (P,), padded. Replica r of R keeps the r-th part of the vector, its shard.

    Zhao et al. call the vector a flat parameter. While it is gathered, the model holds `wholes`. Otherwise it holds
    `pieces`, which the optimizer trains: the part of each parameter in this replica's shard, 1-D and often empty.

    Raises:
        ValueError: if the parameters are of several dtypes.
    """

    def __init__(self, parameters: list[tuple[Member, nn.Parameter]], group: ProcessGroup) -> None:
        first = parameters[0][1]
        for member, parameter in parameters:
            fault = f"of {member.name} is not that of {parameters[0][0].name}, {first.dtype}: convert to one dtype"
            refuse_if(parameter.dtype != first.dtype, "dtype", parameter.dtype, fault)
        self.members, self.group = [member for member, _ in parameters], group
        self.shapes = [parameter.shape for _, parameter in parameters]
        self.each = -(-sum(shape.numel() for shape in self.shapes) // group.size())
        device = first.device if first.is_cuda else torch.empty(0).device  # the default one
        self.flat_P = torch.zeros(self.each * group.size(), dtype=first.dtype, device=device)
        self.wholes = [nn.Parameter(view) for view in self.views(self.flat_P)]
        with torch.no_grad():
            for whole, (_, parameter) in zip(self.wholes, parameters, strict=True):
                whole.copy_(values_of(parameter))
        self.shard = self.flat_P.chunk(group.size())[group.rank()].clone()
        self.pieces = [nn.Parameter(piece) for piece in self.pieces_of(self.shard)]
        for piece in self.pieces:
            piece.sharded_over_replicas = True  # type: ignore[attr-defined]
        self.gathered = True
        self.gathering: tuple[Tensor, Work] | None = None  # what arrives
        self.gradient_P: Tensor | None
        self.gradients: list[Tensor]  # the parameters' parts of gradient_P
        self.missing: set[int]  # parameters whose gradients are not computed yet
        self.reset()

    def views(self, flat_P: Tensor) -> list[Tensor]:
        """Return the parameters' parts of `flat_P`, in their shapes."""
        sizes = [shape.numel() for shape in self.shapes]
        return [part.view(shape) for part, shape in zip(flat_P[: sum(sizes)].split(sizes), self.shapes, strict=True)]

    def pieces_of(self, shard: Tensor) -> list[Tensor]:
        """Return the parameters' parts of this replica's `shard` (P / R,)."""
        first, pieces = -self.each * self.group.rank(), []
        for shape in self.shapes:
            stop = first + shape.numel()
            pieces.append(shard[max(first, 0) : max(stop, 0)])
            first = stop
        return pieces

    def begin_gather(self) -> None:
        """Ask the replicas for their shards, unless they are here or on their way."""
        if not self.gathered and self.gathering is None:
            arriving_P = self.shard.new_empty(len(self.flat_P))
            work = dist.all_gather_single(arriving_P, self.shard, group=self.group, async_op=True)
            self.gathering = arriving_P, work

    def gather(self) -> None:
        """Let the model hold whole parameters."""
        self.begin_gather()
        if self.gathering is not None:
            (arriving_P, work), self.gathering = self.gathering, None
            work.wait()
            self.flat_P.untyped_storage().resize_(self.flat_P.nbytes)
            self.flat_P.data.copy_(arriving_P)  # .data: autograd refuses what it has saved if flat_P itself changes
            self.gathered = True
            self._hold(self.wholes)

    def free(self) -> None:
        """Let the model hold pieces, and free the memory of whole parameters."""
        if self.gathering is not None:  # somebody asked for them, and did not use them
            self.gather()
        if self.gathered:
            self._hold(self.pieces)
            self.flat_P.untyped_storage().resize_(0)
            self.gathered = False

    def _hold(self, parameters: list[nn.Parameter]) -> None:
        for member, parameter in zip(self.members, parameters, strict=True):
            for module, name in member.modules:
                module._parameters[name] = parameter

    def take_gradient(self, index: int) -> None:
        """Move a whole parameter's gradient into the vector of the unit's gradients."""
        if self.gradient_P is None:
            self.gradient_P = self.shard.new_zeros(len(self.flat_P))
            self.gradients = self.views(self.gradient_P)
        gradient, self.wholes[index].grad = self.wholes[index].grad, None
        assert gradient is not None
        torch.mul(gradient, 1 / self.group.size(), out=self.gradients[index])
        self.missing.remove(index)

    def reset(self) -> None:
        """Free, and make ready for the next backward."""
        self.in_backward = False
        self.forget_gradients()
        self.free()

    def forget_gradients(self) -> None:
        """Drop the vector of gradients, whose parts are in the pieces or not wanted."""
        self.gradient_P, self.gradients, self.missing = None, [], set(range(len(self.shapes)))

    def add_to_pieces(self, gradient: Tensor) -> None:
        """Add to the pieces' gradients what this replica's shard (P / R,) has of the unit's mean gradient."""
        for piece, part in zip(self.pieces, self.pieces_of(gradient), strict=True):
            piece.grad = part if piece.grad is None else piece.grad + part


class FlatFSDP(_Replica):
    """Replicas of `module` that see different examples, and share its parameters, gradients and optimizer's state.

    Call it instead of `module`, which holds pieces of parameters from now on: make the optimizer afterwards. Every
    parameter must get a gradient in each backward. Frozen ones stay whole on each replica.

    Args:
        module: the model, the same on every replica. From the CPU its parameters go to the default device, by unit.
        process_group: the replicas.
        blocks: parts of the model that run one after the other, in this order.
    """

    def __init__(self, module: nn.Module, process_group: ProcessGroup, *, blocks: Sequence[nn.Module]) -> None:
        super().__init__(module, process_group)
        self.units: list[FlatUnit] = []
        self._reduced: list[FlatUnit] = []  # in this backward
        self._under_way: tuple[FlatUnit, Tensor, Work] | None = None  # the last reduce-scatter
        for owner, parameters in _owned(module, blocks):
            unit = FlatUnit(parameters, process_group)
            owner.register_forward_pre_hook(partial(self._before_forward, unit))
            owner.register_forward_hook(partial(self._after_forward, unit))
            for index, whole in enumerate(unit.wholes):
                whole.register_post_accumulate_grad_hook(partial(self._take_gradient, unit, index))
            self.units.append(unit)

    def _before_forward(self, unit: FlatUnit, owner: nn.Module, inputs: Any) -> None:
        if unit.in_backward:  # activation checkpointing computes the block again
            return
        if owner is self.module:
            unit.free()  # after a forward without backward it holds old parameters
        self._gather(unit, then=+1)

    def _after_forward(self, unit: FlatUnit, owner: nn.Module, inputs: Any, output: Any) -> None:
        if unit.in_backward:
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, unit))
        if owner is not self.module or not torch.is_grad_enabled():
            unit.free()

    def _before_backward(self, unit: FlatUnit, gradient: Tensor) -> None:
        if not unit.in_backward and unit not in self._reduced:
            self._begin_backward()
            unit.in_backward = True
            self._gather(unit, then=-1)

    def _gather(self, unit: FlatUnit, then: int) -> None:
        unit.gather()
        following = self.units.index(unit) + then
        if 0 <= following < len(self.units):
            self.units[following].begin_gather()

    def _take_gradient(self, unit: FlatUnit, index: int, whole: nn.Parameter) -> None:
        unit.take_gradient(index)
        if unit.missing:
            return
        self._wait_for_reduction()
        unit.in_backward = False
        unit.free()
        assert unit.gradient_P is not None
        gradient = torch.empty_like(unit.shard)
        work = dist.reduce_scatter_single(gradient, unit.gradient_P, group=self.process_group, async_op=True)
        self._under_way = unit, gradient, work
        self._reduced.append(unit)

    def _wait_for_reduction(self) -> None:
        # before the next one begins, so that whole gradients of at most two units are in memory
        if self._under_way is not None:
            (unit, gradient, work), self._under_way = self._under_way, None
            work.wait()
            unit.add_to_pieces(gradient)
            unit.forget_gradients()

    def _missing(self) -> list[str]:
        self._wait_for_reduction()
        late = [unit for unit in self.units if unit not in self._reduced]
        return [unit.members[index].name for unit in late for index in sorted(unit.missing)]

    def _reset(self) -> None:
        if self._under_way is not None:
            self._under_way[2].wait()
        self._reduced, self._in_backward, self._under_way = [], False, None
        for unit in self.units:
            unit.reset()


def _owned(module: nn.Module, blocks: Sequence[nn.Module]) -> list[tuple[nn.Module, list[tuple[Member, nn.Parameter]]]]:
    """Return the parameters that are not frozen by the module that needs them: the whole model, then each block."""
    members: dict[nn.Parameter, Member] = {}
    for prefix, holder in module.named_modules():
        for name, parameter in holder.named_parameters(recurse=False):
            member = members.setdefault(parameter, Member(f"{prefix}.{name}".lstrip("."), []))
            member.modules.append((holder, name))
    in_block = {parameter: block for block in blocks for parameter in block.parameters()}
    owned: dict[nn.Module, list[tuple[Member, nn.Parameter]]] = {owner: [] for owner in (module, *blocks)}
    for parameter, member in members.items():
        if parameter.requires_grad:
            owned[in_block.get(parameter, module)].append((member, parameter))
    return [(owner, parameters) for owner, parameters in owned.items() if parameters]
