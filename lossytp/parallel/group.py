"""The ranks of a tensor-parallel group, and the layout of a job over processes."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

from lossytp.network.checks import check_number, refuse_if
from lossytp.network.lossy_network import CommConfig, LossyNetwork
from lossytp.network.repairs import ZERO, Hadamard, Rescale
from lossytp.network.routes import Link, check_links_within

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


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
        refuse_if(self.size < 1, "tensor_parallel_size", self.size, "is below 1: give the number of ranks")
        fault = f"is no multiple of its {self.processes} processes: give one, or start fewer processes"
        refuse_if(self.size % self.processes, "tensor_parallel_size", self.size, fault)
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
        apart = processes != [*range(processes[0], processes[0] + len(processes))]
        fault = "has processes that are not neighbours, so its links have no names: give neighbours, or first_rank"
        refuse_if(apart, "process_group", processes, fault)
        return processes[0]

    @property
    def num_global_ranks(self) -> int:
        """Return the number of ranks of this group, and of its counterparts in other processes."""
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
        return nothing_to_wait_for if self.processes == 1 else self.plain_group.allreduce([partial]).wait

    def max_(self, partial: "Tensor") -> None:
        """Replace `partial` by the largest of the processes', element by element, reliably."""
        from torch.distributed import AllreduceOptions, ReduceOp

        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX  # type: ignore[assignment]
        if self.processes > 1:
            self.plain_group.allreduce([partial], options).wait()

    def all_rows(self, parts: "Tensor") -> "Tensor":
        """Return every rank's row (R, ...) of `parts` (L, ...), reliably."""
        rows = parts.new_zeros(self.size, *parts.shape[1:])
        rows[self.local.start : self.local.stop] = parts
        self.begin_sum_(rows)()
        return rows


def nothing_to_wait_for() -> None:
    """Do nothing, where a sum is complete already."""


def check_divides(tensor_parallel_size: int, *, heads: int = 0, inner: int = 0, key_value_heads: int = 0) -> None:
    """Raise ValueError unless every rank gets the same number of heads and of the MLP's `inner` units.

    Give `key_value_heads` if queries share them, and 0 for what is not sharded. More ranks than key-value heads must be
    a multiple of their number: each head then has a copy on several ranks.
    """
    check_number("tensor_parallel_size", tensor_parallel_size, Integral, "the number of ranks")
    grouped = key_value_heads if key_value_heads != heads else 0
    counts = {f"{heads} heads": heads, f"{grouped} key-value heads": grouped, f"MLP of {inner}": inner}
    counts = {name: count for name, count in counts.items() if count}
    fits = sizes_that_divide(heads=heads, inner=inner, key_value_heads=key_value_heads)
    if heads + inner and tensor_parallel_size not in fits:
        several = fits[1:] or fits  # one rank alone sends nothing
        fault = f"does not divide the model's {' and its '.join(counts)}: choose one of {', '.join(map(str, several))}"
        raise ValueError(f"tensor_parallel_size = {tensor_parallel_size} {fault}")


def sizes_that_divide(*, heads: int = 0, inner: int = 0, key_value_heads: int = 0) -> list[int]:
    """Return the numbers of ranks that `check_divides` accepts, ascending."""
    divided = [count for count in (heads, inner) if count]
    sizes = [size for size in range(1, max(divided, default=1) + 1) if not any(count % size for count in divided)]
    return [size for size in sizes if not key_value_heads or not key_value_heads % size or not size % key_value_heads]


AXES = ("pp", "dp", "tp")
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them


@dataclass(frozen=True)
class Layout:
    """Pipeline stages of data-parallel replicas of tensor-parallel ranks, over `world_size` processes.

    The `tensor_parallel_size` ranks of a replica are spread evenly over its processes, one or several each.
    Neighbouring processes share a replica, as in Megatron-LM (Narayanan et al., SC 2021). A single process holds all
    ranks as virtual ranks.

    Raises:
        ValueError: if the sizes do not fit the number of processes.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        replicas = self.data_parallel_size * self.pipeline_parallel_size
        fault = f"does not divide {self.world_size} processes: start torchrun --standalone --nproc_per_node {replicas}"
        refuse_if(self.world_size % replicas, "data_parallel_size * pipeline_parallel_size", replicas, fault)
        if self.tensor_parallel_size % self.tensor_processes:
            fits = [n for n in range(self.tensor_parallel_size, 0, -1) if self.tensor_parallel_size % n == 0]
            each = " or ".join(str(replicas * number) for number in fits)
            fault = f"cannot be spread evenly over {self.tensor_processes} processes: start with torchrun --standalone"
            raise ValueError(f"tensor_parallel_size = {self.tensor_parallel_size} {fault} --nproc_per_node {each}")

    @property
    def tensor_processes(self) -> int:
        """Return the number of processes that share the ranks of one replica, or of one stage."""
        return self.world_size // (self.data_parallel_size * self.pipeline_parallel_size)

    @property
    def data_index(self) -> int:
        """Return the index of the replica that this process belongs to."""
        return self.rank // self.tensor_processes % self.data_parallel_size

    @property
    def pipeline_index(self) -> int:
        """Return the index of the stage that this process belongs to."""
        return self.rank // (self.tensor_processes * self.data_parallel_size)

    @cached_property
    def mesh(self) -> "DeviceMesh | None":
        """Return PyTorch's device mesh, with the axes of `AXES`; None for one process. Every process must call this."""
        if self.world_size == 1:
            return None
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        shape = (self.pipeline_parallel_size, self.data_parallel_size, self.tensor_processes)
        return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", shape, mesh_dim_names=AXES)

    def process_group(self, axis: str) -> "ProcessGroup | None":
        """Return the processes that differ from this one only along `axis`; None if there are no others."""
        return None if self.mesh is None or self.mesh[axis].size() == 1 else self.mesh.get_group(axis)

    def tensor_group(self) -> RankGroup:
        """Return the tensor-parallel ranks of this process's replica, numbered over all replicas.

        These numbers name the links of tensor parallelism. The numbers of processes name the links of data-parallel and
        pipeline traffic. The two differ if a process holds several ranks.
        """
        first = (self.pipeline_index * self.data_parallel_size + self.data_index) * self.tensor_parallel_size
        return RankGroup(self.tensor_parallel_size, process_group=self.process_group("tp"), first_rank=first)


def under_torchrun() -> bool:
    """Return whether torchrun's variables are set for this process.

    Raises:
        ValueError: if one of them is missing or wrong.
    """
    given = [name for name in VARIABLES if name in os.environ]
    missing = [name for name in VARIABLES if name not in os.environ]
    if given and missing:
        raise ValueError(f"{given[0]} is set but {', '.join(missing)} is not: start with torchrun, which sets them all")
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT") if given else ():
        if not os.environ[name].isdigit() or (name == "MASTER_PORT" and not 0 < int(os.environ[name]) < 2**16):
            kind = "port, 1 to 65535" if name == "MASTER_PORT" else "whole number"
            raise ValueError(f"{name} = {os.environ[name]!r} is not a {kind}: start with torchrun, which sets it")
    return bool(given)


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank and the world size from torchrun's variables; (0, 1) without them.

    Raises:
        ValueError: if a variable is missing or wrong, or they contradict each other.
    """
    rank, world_size = (int(os.environ[name]) for name in VARIABLES[:2]) if under_torchrun() else (0, 1)
    refuse_if(rank >= world_size, "RANK", rank, f"is not below WORLD_SIZE = {world_size}: number the ranks from 0")
    return rank, world_size


MOST_SHOWN = 8  # links in a message


def check_reaches(network: LossyNetwork, group: RankGroup, comm: CommConfig) -> None:
    """Raise ValueError if the network's scope, named links or nodes leave nothing that the group may lose.

    Other axes of parallelism send other messages. So if the group is not the whole world, only links to or from ranks
    that do not exist are refused.
    """
    comm.check_delivers(network, group.ranks)
    phase, named = network.scope.phase, set(network.named_links)
    check_nodes(network, comm, group.num_global_ranks)
    needs_all = any(comm.repair.part(stage) != ZERO for stage in ("layers", "select"))
    needs_all |= isinstance(comm.repair.part("fill"), Rescale | Hadamard)
    if network.scope.positions is not None and (needs_all or comm.control):
        setting = f"repair = '{comm.repair}'" if needs_all else f"control = {comm.control!r}"
        raise ValueError(f"{setting} does not work where only some positions lose packets: leave one of them out")
    if phase is None and not named:
        return
    check_links_within(network.named_links, group.num_global_ranks)
    lossy = {link for link in comm.lossy_links(group.ranks, phase) if not network.within_node(*link)}
    if group.num_global_ranks > group.size or not comm.lossy_links(group.ranks, None):
        return
    if not lossy:
        fix = "give reliable_gather = False with another algorithm, or leave phase out"
        raise ValueError(f"scope = Scope(phase={phase!r}) loses nothing, as gathers are reliable here: {fix}")
    if named and not named & lossy:
        what = f"the network names {_text(named)}, over which {comm.algorithm.name!r} sends nothing that may be lost"
        raise ValueError(f"{what}: name some of {_text(lossy)}")


def check_nodes(network: LossyNetwork, comm: CommConfig, ranks: int) -> None:
    """Raise ValueError if all links among the first `ranks` global ranks are within a node, so that nothing is lost."""
    links = () if network.ranks_per_node is None else comm.lossy_links(tuple(range(ranks)), None)
    within = links and all(network.within_node(*link) for link in links)
    fault = f"puts all {ranks} ranks into one node, so nothing can be lost: give {ranks - 1} or less, or leave it out"
    refuse_if(within, "ranks_per_node", network.ranks_per_node, fault)


def check_layers(network: LossyNetwork, blocks: int) -> None:
    """Raise ValueError if the network's scope names layers above the model's `blocks`."""
    layers = network.scope.layers
    if layers is not None and layers[1] > blocks:
        raise ValueError(f"layers = {layers} ends above the model's {blocks} blocks: stop at {blocks}")


def _text(links: set[Link]) -> str:
    return ", ".join([f"{src}>{dst}" for src, dst in sorted(links)][:MOST_SHOWN] + ["..."] * (len(links) > MOST_SHOWN))
