"""Connect the processes of a run: a single one, or several under torchrun over the lossy backend."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

import lossytp
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.udp.network import UdpNetwork
from lossytp.parallel import initialize
from lossytp.parallel.initialize import init_process_group, wrapped_backend
from lossytp.parallel.layout import Layout
from lossytp.parallel.over_udp import over_udp
from lossytp.training.config import NetworkSettings
from lossytp.training.freed_memory import keep_freed_memory
from lossytp.training.record import commit


@contextmanager
def connected_processes(config: NetworkSettings, layout: Layout) -> Iterator[LossyNetwork]:
    """Initialise the process group if there are several processes; yield the configured network.

    Raises:
        ValueError: if MASTER_ADDR names no machine, or the processes do not meet, or their settings differ.
    """
    keep_freed_memory()
    network = config.network()
    if layout.world_size == 1:
        yield network
        return
    versions = {"commit": commit(), "lossytp": lossytp.__version__, "torch": torch.__version__}
    init_process_group(
        network,
        wraps="auto",
        timeout_s=config.timeout_s,
        compared={"kind of run": type(config).__name__.removesuffix("Config").lower(), **config.as_dict(), **versions},
        algorithm=config.algorithm,
        repair=config.repair,
        reliable_gather=config.reliable_gather,
    )
    if layout.rank == 0:
        why = ", because some share a GPU, which NCCL refuses" if torch.cuda.is_available() else ""
        over = "nccl" if wrapped_backend() == "nccl" else f"gloo{why}"
        print(f"{layout.world_size} processes send over {over}", file=sys.stderr, flush=True)
    try:
        with over_udp(network) if isinstance(network, UdpNetwork) else nullcontext():
            yield network
    finally:
        dist.destroy_process_group()


def this_device(layout: Layout) -> torch.device:
    """Return this process's GPU, shared if it sees fewer GPUs than its local rank needs, or the CPU."""
    return initialize.this_device(layout.rank)
