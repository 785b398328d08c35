"""Fully sharded data parallelism by hand: each replica keeps a shard of the parameters, and gathers them before use.

Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023, section 3; Rajbhandari et
al., "ZeRO", SC 2020, stage 3. The parameters fall into units: those of each transformer block, and the rest.

    forward    gather the first block, compute, free; gather the second block, compute, free; ...
    backward   gather the last block, compute its gradients, free, reduce-scatter them; then the block before; ...
    optimizer  each replica updates its shards

While one block computes, the next one's gather and the previous one's reduce-scatter run. The rest, such as the
embeddings, stays gathered from the beginning of forward to the end of backward, as in PyTorch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup, Work
from torch.utils._pytree import tree_leaves

from lossytp.parallel.bucketed_ddp import check_all_arrived
from lossytp.parallel.flat_unit import FlatUnit, Member


class FlatFSDP(nn.Module):
    """Replicas of `module` that see different examples, and share its parameters, gradients and optimizer's state.

    Call it instead of `module`, which holds pieces of parameters from now on: make the optimizer afterwards. Every
    parameter must get a gradient in each backward. Frozen ones stay whole on each replica.

    Args:
        module: the model, the same on every replica. From the CPU its parameters go to the default device, by unit.
        process_group: the replicas.
        blocks: parts of the model that run one after the other, in this order.
    """

    def __init__(self, module: nn.Module, process_group: ProcessGroup, *, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.units: list[FlatUnit] = []
        self._in_backward = False
        self._reduced: list[FlatUnit] = []  # in this backward
        self._under_way: tuple[FlatUnit, Tensor, Work] | None = None  # the last reduce-scatter
        for owner, parameters in _owned(module, blocks):
            unit = FlatUnit(parameters, process_group)
            owner.register_forward_pre_hook(partial(self._before_forward, unit))
            owner.register_forward_hook(partial(self._after_forward, unit))
            for index, whole in enumerate(unit.wholes):
                whole.register_post_accumulate_grad_hook(partial(self._take_gradient, unit, index))
            self.units.append(unit)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._in_backward:  # the last one failed
            self._reset()
        return self.module(*inputs, **named)

    def _before_forward(self, unit: FlatUnit, owner: nn.Module, inputs: Any) -> None:
        if unit.in_backward:  # activation checkpointing computes the block again
            return
        if owner is self.module:
            unit.free()  # after a forward without backward it holds old parameters
        unit.gather()
        self._begin_gather(self.units.index(unit) + 1)

    def _after_forward(self, unit: FlatUnit, owner: nn.Module, inputs: Any, output: Any) -> None:
        if unit.in_backward:
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, unit))
        if owner is not self.module or not torch.is_grad_enabled():
            unit.free()

    def _before_backward(self, unit: FlatUnit, gradient: Tensor) -> None:
        if unit.in_backward or unit in self._reduced:
            return
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._finish)
        unit.in_backward = True
        unit.gather()
        self._begin_gather(self.units.index(unit) - 1)

    def _begin_gather(self, index: int) -> None:
        if 0 <= index < len(self.units):
            self.units[index].begin_gather()

    def _take_gradient(self, unit: FlatUnit, index: int, whole: nn.Parameter) -> None:
        """Take a gradient. Free and reduce-scatter the unit if it is the last one."""
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
        """Wait for the reduce-scatter under way, so that whole gradients of at most two units are in memory."""
        if self._under_way is not None:
            unit, gradient, work = self._under_way
            work.wait()
            unit.add_to_pieces(gradient)
            unit.forget_gradients()
            self._under_way = None

    def _finish(self) -> None:
        """Wait and free, at the end of backward.

        Raises:
            RuntimeError: if a parameter got no gradient.
        """
        self._wait_for_reduction()
        late = [unit for unit in self.units if unit not in self._reduced]
        missing = [unit.members[index].name for unit in late for index in sorted(unit.missing)]
        self._reset()
        check_all_arrived(missing)

    def _reset(self) -> None:
        """Free, drop the gradients that a failed backward has left, and make ready for the next one."""
        if self._under_way is not None:
            self._under_way[2].wait()
        self._reduced, self._in_backward, self._under_way = [], False, None
        for unit in self.units:
            unit.in_backward = False
            unit.forget_gradients()
            unit.free()

    def whole(self, piece_of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        """Gather something that the replicas hold in pieces, such as gradients or an optimizer's moments.

        Args:
            piece_of: returns this replica's piece for an optimizer parameter.

        Returns:
            The whole tensors, by the parameters' names in `module`. Every replica must call this.
        """
        wholes: dict[str, Tensor] = {}
        for unit in self.units:
            names = [member.name for member in unit.members]
            wholes |= zip(names, unit.whole([piece_of(piece) for piece in unit.pieces]), strict=True)
        return wholes


def _owned(module: nn.Module, blocks: Sequence[nn.Module]) -> list[tuple[nn.Module, list[tuple[Member, nn.Parameter]]]]:
    """Return the parameters that are not frozen by the module that needs them: the whole model, then each block."""
    members: dict[nn.Parameter, Member] = {}
    for prefix, holder in module.named_modules():
        for name, parameter in holder.named_parameters(recurse=False):
            member = members.setdefault(parameter, Member(f"{prefix}.{name}".lstrip("."), []))
            member.modules.append((holder, name))
    in_block = {parameter: block for block in blocks for parameter in block.parameters()}
    owned = []
    for owner in (module, *blocks):
        mine = [
            (member, parameter)
            for parameter, member in members.items()
            if parameter.requires_grad and in_block.get(parameter, module) is owner
        ]
        if mine:
            owned.append((owner, mine))
    return owned
