"""Join the processes of torch.distributed by UDP sockets."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lossytp.network.datagrams import address_of, new_session
from lossytp.network.udp.mesh import Mesh
from lossytp.network.udp.network import UdpNetwork
from lossytp.parallel.replicas import gathered

LOOPBACK = "127.0.0.1"


@contextmanager
def over_udp(network: UdpNetwork) -> Iterator[None]:
    """Let the network send over UDP within the block. All processes must enter it.

    If one fails, the others fail too. Processes on one machine use loopback. Others use the address from which
    they reach MASTER_ADDR.
    """
    hosts = gathered(_own_address(), network)
    mesh = Mesh(dist.get_rank(), LOOPBACK if len(set(hosts)) == 1 else hosts[dist.get_rank()])
    try:
        told = gathered((mesh.address, new_session()), network)
        mesh.connect({rank: address for rank, (address, _) in enumerate(told)}, told[0][1])
        network.connect(mesh)
        yield
    finally:
        mesh.close()


def _own_address() -> str:
    """Return this machine's address on the way to MASTER_ADDR; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.connect((address_of(os.environ["MASTER_ADDR"]), 9))
        return str(opened.getsockname()[0])
