"""The ranks that sum their messages, and which of them are in this process."""

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

    Args:
        size: number of ranks.
        process_group: the processes over which the ranks are spread evenly, in order. Without it, all are virtual ranks
            of this process, along an axis of its tensors.
        first_rank: global rank of the first rank, by which links are named. If left out, it follows from the group's
            first process, and all its processes must be neighbours.
        name: distinguishes groups on the same link. If left out, it follows from the first rank.

    Raises:
        ValueError: if `size` is below 1, or not a multiple of the number of processes, or if the processes are not
            neighbours and `first_rank` is left out.
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

    def __deepcopy__(self, memo: object) -> "RankGroup":
        """Return this group: it never changes, and process groups cannot be copied."""
        return self

    def _first_process(self) -> int:
        if self.process_group is None:
            return 0
        from torch.distributed import get_process_group_ranks

        processes = get_process_group_ranks(self.process_group)
        if processes != [*range(processes[0], processes[0] + len(processes))]:
            raise ValueError(
                f"process_group = processes {processes}, which are not neighbours, so their links have no names: give "
                "a group of neighbours, or first_rank"
            )
        return processes[0]

    @property
    def num_global_ranks(self) -> int:
        """Return the number of global ranks: those of this group, and those of its counterparts in other processes."""
        from torch.distributed import get_world_size, is_available, is_initialized

        processes = get_world_size() if is_available() and is_initialized() else self.processes
        return max(self.first_rank + self.size, processes * self.size // self.processes)

    @property
    def processes(self) -> int:
        return self.process_group.size() if self.process_group else 1

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return the global ranks, by position in the group."""
        return tuple(range(self.first_rank, self.first_rank + self.size))

    @cached_property
    def local(self) -> range:
        """Return the positions of the ranks in this process."""
        here = self.size // self.processes
        first = self.process_group.rank() * here if self.process_group else 0
        return range(first, first + here)

    @property
    def plain_group(self) -> Any:
        """Return the process group, or the one that a lossy process group wraps."""
        return getattr(self.process_group, "wrapped", self.process_group)

    def begin_sum_(self, partial: "Tensor") -> Callable[[], object]:
        """Begin to add up the processes' partial sums in place; return a function that waits for the result.

        Nothing is lost here: every process has already applied the losses that `LossyNetwork` drew. If the process
        group is lossy, the group that it wraps carries the sum.
        """
        if self.process_group is None or self.processes == 1:
            return nothing_to_wait_for
        return self.plain_group.allreduce([partial]).wait

    def max_(self, partial: "Tensor") -> None:
        """Replace `partial` by the largest of the processes', element by element, reliably."""
        if self.process_group is None or self.processes == 1:
            return
        from torch.distributed import AllreduceOptions, ReduceOp

        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX  # type: ignore[assignment]
        self.plain_group.allreduce([partial], options).wait()

    def all_rows(self, parts: "Tensor") -> "Tensor":
        """Return every rank's row (R, ...) of `parts` (L, ...), reliably."""
        rows = parts.new_zeros(self.size, *parts.shape[1:])
        rows[self.local.start : self.local.stop] = parts
        self.begin_sum_(rows)()
        return rows


def nothing_to_wait_for() -> None:
    """Do nothing, instead of waiting for a sum that is already complete."""


def check_divides(tensor_parallel_size: int, *, heads: int = 0, inner: int = 0, key_value_heads: int = 0) -> None:
    """Raise ValueError unless every rank gets the same number of heads and of the MLP's `inner` units.

    Give `key_value_heads` if queries share them, and 0 for what is not sharded.
    """
    check_number("tensor_parallel_size", tensor_parallel_size, Integral, "the number of ranks")
    grouped = key_value_heads if key_value_heads != heads else 0
    counts = {f"{heads} heads": heads, f"{grouped} key-value heads": grouped, f"MLP of {inner}": inner}
    counts = {name: count for name, count in counts.items() if count}
    fits = [size for size in range(1, max(counts.values()) + 1) if not any(n % size for n in counts.values())]
    if tensor_parallel_size not in fits:
        raise ValueError(
            f"tensor_parallel_size = {tensor_parallel_size} does not divide the model's {' and its '.join(counts)}: "
            f"choose one of {', '.join(map(str, fits))}"
        )
