"""Connect the processes of a run: a single one, or several under torchrun over the lossy backend."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.udp.network import UdpNetwork
from lossytp.parallel.initialize import init_process_group
from lossytp.parallel.layout import Layout
from lossytp.parallel.over_udp import over_udp
from lossytp.training.config import NetworkSettings
from lossytp.training.freed_memory import keep_freed_memory


@contextmanager
def connected_processes(config: NetworkSettings, layout: Layout) -> Iterator[LossyNetwork]:
    """Initialise the process group if there are several processes; yield the configured network.

    Raises:
        ValueError: if MASTER_ADDR names no machine, or the processes do not meet.
    """
    keep_freed_memory()
    network = config.network()
    if layout.world_size == 1:
        yield network
        return
    _check_address(os.environ["MASTER_ADDR"])
    device_each = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size))
    wraps = "nccl" if torch.cuda.is_available() and device_each else "gloo"  # NCCL refuses two ranks on one GPU
    init_process_group(
        network,
        wraps=wraps,
        algorithm=config.algorithm,
        repair=config.repair,
        reliable_gather=config.reliable_gather,
    )
    try:
        with over_udp(network) if isinstance(network, UdpNetwork) else nullcontext():
            yield network
    finally:
        dist.destroy_process_group()


def _check_address(host: str) -> None:
    """Raise ValueError if a name has no address. torch would try for a long time, and fail with many lines."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"MASTER_ADDR = {host!r} names no machine ({error}): give the name or address of rank 0's machine"
        ) from error


def this_device(layout: Layout) -> torch.device:
    """Return this process's GPU, shared if there are fewer GPUs than processes, or the CPU."""
    devices = torch.cuda.device_count()
    local_rank = int(os.environ.get("LOCAL_RANK", layout.rank))
    return torch.device("cuda", local_rank % devices) if devices else torch.device("cpu")
