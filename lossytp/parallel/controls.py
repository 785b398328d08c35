"""Controls for a study of packet loss: other damage of the same expected squared error, to tell what its form matters.

Independent elements are lost where packets hold one element, `Wire(elements=1)`. Gaussian noise is here.
"""

import math

import torch

from lossytp.network.counters import Site
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.repair import Repair, Zero
from lossytp.network.routes import Hops
from lossytp.parallel.missing import Rows


def add_noise_(rows: Rows, hops: Hops, network: LossyNetwork, group: str, site: Site | None) -> None:
    """Add to what crosses a link of loss rate p white Gaussian noise of variance p times its mean square.

    Losing its packets, and leaving zeros, makes the same expected squared error: p times the sum of its squares.
    """
    normals = network.normals(hops, group=group, site=site)
    for hop, numbers in zip(hops, normals, strict=False):  # none where the network is reliable
        for row in rows.of(hop.positions):
            message = rows.rows_LN[row, hop.start : hop.stop]
            scale = math.sqrt(network.process(hop.src, hop.dst).loss_rate) * message.square().mean().sqrt()
            message += scale * torch.from_numpy(numbers).to(message)


def check_noise(algorithm: str, repair: Repair, exact_adjoint: bool, sequence_parallel: bool) -> None:
    """Raise ValueError, with the reason, where noise cannot stand in for losses."""
    one_hop = ("sender", "direct") if sequence_parallel else ("sender", "direct", "switch")
    if algorithm not in one_hop:
        raise ValueError(
            f"control = 'noise' with algorithm = {algorithm!r}: its hops carry several ranks' parts, whose error "
            f"adds up; choose one of {', '.join(one_hop)}"
        )
    if not isinstance(repair, Zero) or exact_adjoint:
        raise ValueError("control = 'noise' loses nothing that a repair or an adjoint could know of: leave them out")
