"""Which ranks sum their messages, and which of them live in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

from lossytp.network.checks import check_number

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RankGroup:
    """`size` ranks that sum their messages.

    Without a `process_group` all of them are virtual ranks in this process, an axis of its tensors; with one they are
    spread evenly over its processes, in order. `first_rank` is the global rank of the first, which names the links;
    left out, it follows from the group's first process. `name` tells groups on the same link apart; left out, it
    follows from the first rank.

    Raises ValueError where `size` is not positive, or not a multiple of the processes.
    """

    size: int
    name: str = ""
    process_group: "ProcessGroup | None" = None
    first_rank: int = -1

    def __post_init__(self) -> None:
        check_number("tensor_parallel_size", self.size, Integral, "the number of ranks")
        if self.size < 1:
            raise ValueError(f"tensor_parallel_size = {self.size} is below 1: give the number of ranks")
        if self.size % self.processes:
            raise ValueError(
                f"tensor_parallel_size = {self.size} is not a multiple of the {self.processes} processes that share "
                f"the ranks: give a multiple of {self.processes}, or start fewer processes"
            )

        if self.first_rank < 0:
            object.__setattr__(self, "first_rank", self._first_process() * self.size // self.processes)
        if not self.name:
            object.__setattr__(self, "name", f"tp{self.first_rank}" if self.first_rank else "tp")

    def _first_process(self) -> int:
        if self.process_group is None:
            return 0
        from torch.distributed import get_global_rank

        return get_global_rank(self.process_group, 0)

    @property
    def world_size(self) -> int:
        """Global ranks in all: this group's, and those of the groups like it that other processes hold."""
        from torch.distributed import get_world_size, is_available, is_initialized

        processes = get_world_size() if is_available() and is_initialized() else self.processes
        return max(self.first_rank + self.size, processes * self.size // self.processes)

    @property
    def processes(self) -> int:
        return self.process_group.size() if self.process_group else 1

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, by position in the group."""
        return tuple(range(self.first_rank, self.first_rank + self.size))

    @cached_property
    def local(self) -> range:
        """The positions of the ranks that live in this process."""
        here = self.size // self.processes
        first = self.process_group.rank() * here if self.process_group else 0
        return range(first, first + here)

    @property
    def plain_group(self) -> Any:
        """The process group, or the one that it wraps where it is a lossy one."""
        return getattr(self.process_group, "wrapped", self.process_group)

    def begin_sum_(self, partial: "Tensor") -> Callable[[], object]:
        """Begin to add up the processes' partial sums, in place; the returned function waits for the end.

        Nothing is lost on this way: what is lost was lost before, on every process as `LossyNetwork` says. Where the
        process group is a lossy one, the group it wraps carries the sum.
        """
        if self.process_group is None or self.processes == 1:
            return _nothing_to_wait_for
        return self.plain_group.allreduce([partial]).wait


def _nothing_to_wait_for() -> None:
    pass


def check_divides(tensor_parallel_size: int, *, heads: int, inner: int) -> None:
    """Raise ValueError unless every rank gets as many of the heads, and of the MLP's `inner` units, as any other."""
    check_number("tensor_parallel_size", tensor_parallel_size, Integral, "the number of ranks")
    if tensor_parallel_size < 1 or heads % tensor_parallel_size or inner % tensor_parallel_size:
        fits = [size for size in range(1, heads + 1) if heads % size == 0 and inner % size == 0]
        raise ValueError(
            f"tensor_parallel_size = {tensor_parallel_size} does not divide the model's {heads} heads and its MLP of "
            f"{inner}: choose one of {', '.join(map(str, fits))}"
        )
