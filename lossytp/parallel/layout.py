"""How a run is laid out over processes, and the place of this process."""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lossytp.parallel.group import RankGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

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
        if self.world_size % replicas:
            raise ValueError(
                f"data_parallel_size = {self.data_parallel_size} and pipeline_parallel_size = "
                f"{self.pipeline_parallel_size} need {replicas} processes, or a multiple, and there are "
                f"{self.world_size}: start with torchrun --standalone --nproc_per_node {replicas}"
            )
        if self.tensor_parallel_size % self.tensor_processes:
            fits = [n for n in range(self.tensor_parallel_size, 0, -1) if self.tensor_parallel_size % n == 0]
            raise ValueError(
                f"tensor_parallel_size = {self.tensor_parallel_size} cannot be spread evenly over "
                f"{self.tensor_processes} processes: start with torchrun --standalone --nproc_per_node "
                f"{' or '.join(str(replicas * number) for number in fits)}"
            )

    @property
    def tensor_processes(self) -> int:
        """Return the number of processes that share one replica's tensor-parallel ranks."""
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
        return RankGroup(
            self.tensor_parallel_size,
            process_group=self.process_group("tp"),
            first_rank=first,
        )


def under_torchrun() -> bool:
    """Return whether torchrun's variables are set for this process.

    Raises:
        ValueError: if one of them is missing.
    """
    given = [name for name in VARIABLES if name in os.environ]
    if given and len(given) < len(VARIABLES):
        missing = ", ".join(name for name in VARIABLES if name not in given)
        raise ValueError(
            f"{given[0]} is set but {missing} is not: start with torchrun, which sets {', '.join(VARIABLES)}"
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if given and not os.environ[name].isdigit():
            raise ValueError(f"{name} = {os.environ[name]!r} is not a whole number: start with torchrun, which sets it")
    if given and not 0 < int(os.environ["MASTER_PORT"]) < 2**16:
        raise ValueError(f"MASTER_PORT = {os.environ['MASTER_PORT']} is not between 1 and 65535: choose another")
    return bool(given)


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank and the world size from torchrun's variables; (0, 1) without them.

    Raises:
        ValueError: if the variables contradict each other.
    """
    if not under_torchrun():
        return 0, 1
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world_size:
        raise ValueError(f"RANK = {rank} is not below WORLD_SIZE = {world_size}: number the ranks from 0")
    return rank, world_size
