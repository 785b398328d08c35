"""Start torch.distributed over a lossy network, from the variables that torchrun sets.

Each error is one line that names the variable or the port, and the fix.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # whose signatures would keep the group that exists when they are first read
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed import Backend, DistNetworkError, DistStoreError, ProcessGroup

from lossytp.network.checks import check_known, check_names
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.wiring import Wiring
from lossytp.parallel import functional as functional  # registers a kernel
from lossytp.parallel.layout import rank_and_world_size, under_torchrun
from lossytp.parallel.lossy_backend import LossyProcessGroup

JOIN_TIMEOUT_S = 20.0
BACKENDS = ("gloo", "nccl")


@dataclass
class _Settings:
    """The settings of the backend's groups: one instance per process, as torch.distributed has one world."""

    network: LossyNetwork
    wraps: str
    wiring: Wiring


_settings: _Settings | None = None


def init_process_group(
    network: LossyNetwork,
    *,
    wraps: str = "gloo",
    join_timeout_s: float = JOIN_TIMEOUT_S,
    **settings: Any,
) -> None:
    """Initialise torch.distributed with the backend `lossy`, for sub-groups and meshes too.

    Args:
        network: the network, with the same seed, loss processes and wire on every rank.
        wraps: "gloo" (CPU and CUDA tensors) or "nccl" (CUDA tensors, one rank per GPU; gloo carries CPU tensors).
        join_timeout_s: seconds to wait for the other ranks, unless torchrun's agent has connected them.
        settings: `algorithm`, `repair` and `reliable_gather` of every operation, as in `Wiring.named`. With
            `reliable_gather=False`, each rank's result of an all-reduce loses packets too. This has no effect with
            "sender", whose sum reaches all ranks.

    Raises:
        ValueError: if torchrun did not start this process, a variable is missing, the port is in use, not all ranks
            join, a name is unknown, or torch.distributed is already initialised.
    """
    global _settings
    check_known("wraps", wraps, BACKENDS)
    wiring = backend_wiring(**settings)
    if not under_torchrun():
        raise ValueError(
            "torch.distributed needs several processes: start with torchrun --standalone --nproc_per_node 2"
        )
    if dist.is_initialized():
        raise ValueError("torch.distributed is initialised already: call destroy_process_group() first")
    rank, world = rank_and_world_size()
    if wraps == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    _settings = _Settings(network, wraps, wiring)
    Backend.register_backend("lossy", _make_group, extended_api=True, devices=["cpu", "cuda"])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("lossy")
    else:
        store = _join(rank, world, join_timeout_s)
        dist.init_process_group("lossy", store=store, rank=rank, world_size=world)


def backend_wiring(*, reliable_gather: bool = True, **names: str) -> Wiring:
    """Return the wiring of every operation of the backend, given the names of its `algorithm` and `repair`.

    "sender" has no gather that could lose packets.
    """
    check_names(names, ("algorithm", "repair"))
    wiring = Wiring.named(**names)
    return replace(wiring, reliable_gather=reliable_gather or wiring.algorithm.sum_reaches_all)


def joined() -> bool:
    """Return whether this process has begun to join others over a lossy network."""
    return _settings is not None


@contextmanager
def reliable() -> Iterator[None]:
    """Lose nothing over the backend `lossy` within the block, and advance no link. Every rank must enter it.

    Raises:
        ValueError: before `init_process_group`, or after `destroy_process_group`.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(world, LossyProcessGroup):
        raise ValueError("no lossy process group is running: call init_process_group first, or use network.reliable()")
    with world.network.reliable():
        yield


def _join(rank: int, world: int, timeout_s: float) -> TCPStore:
    """Return the store through which ranks that were started by hand find each other."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return TCPStore(host, port, world, is_master=rank == 0, timeout=timedelta(seconds=timeout_s))
    except (DistNetworkError, DistStoreError, RuntimeError) as error:
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise ValueError(
                f"MASTER_PORT = {port} is in use on {host}: choose another, the same for all ranks"
            ) from error
        if rank == 0:
            raise ValueError(
                f"not all of the {world} ranks joined within {timeout_s:g} s: start them all, or correct WORLD_SIZE"
            ) from error
        raise ValueError(
            f"rank {rank} found no rank 0 at {host}:{port}, or not all of the {world} ranks joined, within "
            f"{timeout_s:g} s: start them all, or correct MASTER_ADDR, MASTER_PORT or WORLD_SIZE"
        ) from error


def _make_group(options: Any, _: Any) -> LossyProcessGroup:
    """Make a lossy group for torch.distributed, around a plain one of the same ranks."""
    assert _settings is not None
    rank, size = options.group_rank, options.group_size
    wrapped = ProcessGroup(options.store, rank, size)
    gloo: Any = ProcessGroupGloo(options.store, rank, size, options.timeout)
    backends = {"cpu": (ProcessGroup.BackendType.GLOO, gloo), "cuda": (ProcessGroup.BackendType.GLOO, gloo)}
    if _settings.wraps == "nccl":
        settings: Any = dist.ProcessGroupNCCL.Options()
        settings._timeout = options.timeout
        store = PrefixStore("nccl", options.store)  # gloo uses the store's other keys
        nccl: Any = dist.ProcessGroupNCCL(store, rank, size, settings)
        backends["cuda"] = (ProcessGroup.BackendType.NCCL, nccl)
    for device, (kind, backend) in backends.items():
        backend._set_sequence_number_for_group()
        wrapped._register_backend(torch.device(device), kind, backend)
    wrapped._set_default_backend(backends["cuda"][0])
    return LossyProcessGroup(
        wrapped,
        name=options.group_id,
        ranks=options.global_ranks_in_group or range(size),  # torch leaves it empty for the default group
        network=_settings.network,
        wiring=_settings.wiring,
    )
