"""Start torch.distributed over a lossy network: the backend `lossy`, from the variables that torchrun sets."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore
from torch.distributed import Backend, ProcessGroup, distributed_c10d

from lossytp.network.checks import check_known, check_names, shown
from lossytp.network.lossy_network import CommConfig, LossyNetwork
from lossytp.parallel.group import check_nodes, rank_and_world_size, under_torchrun
from lossytp.parallel.process_group import LossyProcessGroup

TIMEOUT_S = 1800.0  # PyTorch's own for gloo
SILENT_S = 5.0  # of waiting before a rank says for whom
BACKENDS = ("gloo", "nccl", "auto")


@dataclass
class _Settings:
    """The settings of the backend's groups: one instance per process, as torch.distributed has one world."""

    network: LossyNetwork
    wraps: str
    comm: CommConfig


_settings: _Settings | None = None


def init_process_group(
    network: LossyNetwork,
    *,
    wraps: str = "gloo",
    timeout_s: float = TIMEOUT_S,
    compared: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Initialise torch.distributed with the backend `lossy`, for sub-groups and meshes too.

    Args:
        network: the network, with the same seed, loss processes and wire on every rank.
        wraps: "gloo" (CPU and CUDA tensors), "nccl" (CUDA tensors, one rank per GPU; gloo carries CPU tensors), or
            "auto": NCCL if each rank has a GPU of its own, else gloo, the same on all ranks.
        timeout_s: seconds to wait for the other ranks, at the start and in each collective.
        compared: more settings that must be equal on all ranks, as JSON can hold them.
        settings: `algorithm`, `repair` and `reliable_gather` of every operation, as in `CommConfig.named`. With
            `reliable_gather=False`, each rank's result of an all-reduce loses packets too. This has no effect with
            "sender", whose sum reaches all ranks.

    Raises:
        ValueError: if torchrun did not start this process, a variable is missing or wrong, the port is in use, not all
            ranks join, their settings differ, a name is unknown, or torch.distributed is already initialised.
    """
    global _settings
    check_known("wraps", wraps, BACKENDS)
    comm = backend_comm(**settings)
    if not under_torchrun():
        raise ValueError("torch.distributed needs several processes: start torchrun --standalone --nproc_per_node 2")
    if dist.is_initialized():
        raise ValueError("torch.distributed is initialised already: call destroy_process_group() first")
    rank, world = rank_and_world_size()
    device = this_device(rank)
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" and wraps == "auto" else ""
    mine = {**(compared or {}), "wraps": wraps, "device": device.type, "timeout_s": timeout_s, "gpu": gpu}
    mine |= _as_compared(network, comm, world)
    _settings = _Settings(network, wraps, comm)
    store = _join(rank, world, timeout_s)
    everyone = _compared(store, rank, world, mine, timeout_s)
    if wraps == "auto":
        _settings.wraps = backend_for([theirs["gpu"] for theirs in everyone])
    if wraps != "gloo" and device.type == "cuda":
        torch.cuda.set_device(device)
    Backend.register_backend("lossy", _make_group, extended_api=True, devices=["cpu", "cuda"])
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("lossy", store=store, rank=rank, world_size=world, timeout=limit)
    dist.monitored_barrier()  # gloo fails on a rank that still connects when another one leaves


def serve_all_groups(network: LossyNetwork, comm: CommConfig, started: Callable[[Store, int, int], None]) -> None:
    """Carry over `network` whatever this process's gloo and NCCL groups send from now on, whoever makes them.

    A group is what its maker asks for, with its options and by its name, within a `LossyProcessGroup`. `started` is
    called with the store, the rank and the size of each default group, once its ranks have the same settings.
    """
    global _settings
    _settings = _Settings(network, "nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo", comm)
    Backend.register_backend("lossy", _make_group, extended_api=True, devices=["cpu", "cuda"])
    c10d: Any = distributed_c10d  # every group is made and registered by these two functions of it
    make, register = c10d._new_process_group_helper, c10d._register_pg_in_world

    def make_lossy(size: int, rank: int, ranks: list[int], *args: Any, **named: Any) -> Any:
        lossy = []

        def register_lossy(group: ProcessGroup, **world: Any) -> None:
            backends = {pair.partition(":")[2] for pair in world["backend_config"].split(",")}
            if type(group) is ProcessGroup and backends <= {"gloo", "nccl"}:
                name = world["group_name"]
                group = LossyProcessGroup(group, name=name, ranks=ranks or range(size), network=network, comm=comm)
                group._set_group_name(name)
                lossy.append(group)
            register(group, **world)

        c10d._register_pg_in_world = register_lossy
        try:
            group, store = make(size, rank, ranks, *args, **named)
        finally:
            c10d._register_pg_in_world = register
        if lossy and not ranks:
            own = PrefixStore("lossytp", store)
            _compared(own, rank, size, _as_compared(network, comm, size), named["timeout"].total_seconds())
            started(own, rank, size)
        return lossy[0] if lossy else group, store

    c10d._new_process_group_helper = make_lossy


def _as_compared(network: LossyNetwork, comm: CommConfig, world: int) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks."""
    check_nodes(network, comm, world)
    return {
        "algorithm": comm.algorithm.name,
        "repair": str(comm.repair),
        "reliable_gather": comm.reliable_gather,
        "seed": network.seed,
        **network.state_dict()["settings"],
        "WORLD_SIZE": world,
    }


def backend_for(gpus: Sequence[str]) -> str:
    """Return "nccl" if each rank's GPU, known by its UUID, is its own, else "gloo": NCCL refuses two ranks on one."""
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def wrapped_backend() -> str | None:
    """Return the backend that carries this process's messages, or None if it has joined no others."""
    return _settings.wraps if _settings is not None and dist.is_initialized() else None


def this_device(rank: int) -> torch.device:
    """Return this process's GPU, shared if it sees fewer GPUs than its local rank needs, or the CPU."""
    visible = torch.cuda.device_count()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % visible) if visible else torch.device("cpu")


def backend_comm(*, reliable_gather: bool = True, **names: str) -> CommConfig:
    """Return the configuration of every operation of the backend. "sender" has no gather that could lose packets."""
    check_names(names, ("algorithm", "repair"))
    comm = CommConfig.named(**names)
    return replace(comm, reliable_gather=reliable_gather or comm.algorithm.sum_reaches_all)


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


def _join(rank: int, world: int, timeout_s: float) -> Store:
    """Return the store through which the ranks find each other; torchrun's agent keeps one for all joins of a job."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:  # TCPStore would try for a long time, and fail with many lines
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"MASTER_ADDR = {host!r} names no machine ({error}): give that of rank 0's machine") from error
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not is_host:
        fix = "start it, or correct MASTER_ADDR or MASTER_PORT"
        _wait_until(partial(_answers, host, port), f"rank {rank} waits for rank 0 at {host}:{port}", timeout_s, fix)
    try:
        store = TCPStore(host, port, world, is_host, timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise
        message = f"MASTER_PORT = {port} is in use on {host}: choose another, the same for all ranks"
        raise ValueError(message) from error
    return PrefixStore(f"lossytp/{store.add(f'joins of {rank}', 1)}", store)


def _answers(host: str, port: int) -> bool:
    """Return whether something listens there. A connection to a free port of this machine may meet itself."""
    try:
        with socket.create_connection((host, port), SILENT_S) as probe:
            return probe.getsockname() != probe.getpeername()
    except OSError:
        return False


def _compared(store: Store, rank: int, world: int, mine: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Return each rank's settings. Raise ValueError if a rank does not come, or if more than its gpu differs."""
    store.set(f"settings of {rank}", json.dumps(mine))
    everyone: list[dict[str, Any]] = []
    try:
        for other in range(world):
            key, waiting = f"settings of {other}", f"rank {rank} waits for rank {other} of {world}"
            _wait_until(partial(store.check, [key]), waiting, timeout_s, "start it, or correct WORLD_SIZE")
            everyone.append(json.loads(store.get(key)))
            for name in {**everyone[0], **everyone[other]}:
                first, theirs = (everyone[number].get(name) for number in (0, other))
                if first != theirs and name != "gpu":
                    what = f"{name} = {shown(first)} on rank 0 and {shown(theirs)} on rank {other}"
                    raise ValueError(f"{what}: start all processes of a job alike")
    except ValueError:
        store.set(f"{rank} knows", "")
        if rank == 0:  # its store must not end before the others know, too
            with suppress(ValueError):
                all_know = partial(store.check, [f"{number} knows" for number in range(world)])
                _wait_until(all_know, "", min(timeout_s, SILENT_S), "")
        raise
    return everyone


def _wait_until(ready: Callable[[], bool], waiting: str, timeout_s: float, fix: str) -> None:
    """Wait until `ready`. After some seconds, say who is `waiting` for whom; at last, raise ValueError."""
    started, silent = time.monotonic(), True
    while not ready():
        waited = time.monotonic() - started
        if waited > timeout_s:
            raise ValueError(f"{waiting}, in vain for timeout_s = {timeout_s:g} seconds: {fix}")
        if waited > SILENT_S and silent:
            silent = False
            print(f"{waiting}, for timeout_s = {timeout_s:g} seconds at most", file=sys.stderr, flush=True)
        time.sleep(0.02)


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
        comm=_settings.comm,
    )
