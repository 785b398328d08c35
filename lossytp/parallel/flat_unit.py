"""Parameters that replicas shard, gather and free together, side by side in one vector.

`lossytp.parallel.flat_fsdp` decides when. Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.1, call the vector a flat
parameter.

Shapes: P elements of the vector, padded to a multiple of the R replicas.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from lossytp.parallel.deferred import values_of


class Member(NamedTuple):
    """A parameter's name in the model, and the modules that hold it: several if it is tied."""

    name: str
    modules: list[tuple[nn.Module, str]]


class FlatUnit:
    """Parameters side by side in a vector (P,). Replica r of R keeps the r-th part of the vector, its shard.

    While they are gathered, the model holds `wholes`. Otherwise it holds `pieces`, which the optimizer trains: the part
    of each parameter in this replica's shard, one-dimensional and often empty.

    Args:
        parameters: the parameters with their names and modules, all of one dtype.
        group: the replicas.

    Raises:
        ValueError: if they are of several dtypes.
    """

    def __init__(self, parameters: list[tuple[Member, nn.Parameter]], group: ProcessGroup) -> None:
        first = parameters[0][1]
        for member, parameter in parameters:
            if parameter.dtype != first.dtype:
                raise ValueError(
                    f"{member.name} is {parameter.dtype} and {parameters[0][0].name} {first.dtype}: convert the model "
                    "to one dtype"
                )
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
        self.in_backward = False
        self.gradient_P: Tensor | None
        self.gradients: list[Tensor]  # the parameters' parts of gradient_P
        self.missing: set[int]  # parameters whose gradients are not computed yet
        self.forget_gradients()
        self.free()

    def views(self, flat_P: Tensor) -> list[Tensor]:
        """Return the parameters' parts of `flat_P`, in their shapes."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = flat_P[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

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
            self.gradient_P = self.shard.new_zeros(self.each * self.group.size())
            self.gradients = self.views(self.gradient_P)
        gradient, self.wholes[index].grad = self.wholes[index].grad, None
        assert gradient is not None
        torch.mul(gradient, 1 / self.group.size(), out=self.gradients[index])
        self.missing.remove(index)

    def forget_gradients(self) -> None:
        """Make ready for the next backward."""
        self.gradient_P, self.gradients, self.missing = None, [], set(range(len(self.shapes)))

    def add_to_pieces(self, gradient: Tensor) -> None:
        """Add to the pieces' gradients what this replica's shard (P / R,) has of the unit's mean gradient."""
        for piece, part in zip(self.pieces, self.pieces_of(gradient), strict=True):
            piece.grad = part if piece.grad is None else piece.grad + part

    def whole(self, pieces: list[Tensor]) -> list[Tensor]:
        """Return the whole tensors, in the parameters' shapes, given this replica's pieces of each."""
        shard = torch.zeros_like(self.shard)
        for part, piece in zip(self.pieces_of(shard), pieces, strict=True):
            part.copy_(piece.detach())
        flat_P = shard.new_empty(self.each * self.group.size())
        dist.all_gather_single(flat_P, shard, group=self.group)
        return self.views(flat_P)
