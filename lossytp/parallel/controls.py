"""Controls for a study of packet loss: other damage of the same expected squared error, to tell what its form matters.

Independent elements are lost where packets hold one element, `Wire(elements=1)`. Gaussian noise is here.
"""

import math

import torch

from lossytp.network.counters import Site
from lossytp.network.lossy_network import LossyNetwork
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
            wide = message.double()  # squares of fp16 would overflow, or vanish
            scale = math.sqrt(network.process(hop.src, hop.dst).loss_rate) * wide.square().mean().sqrt()
            message.copy_(wide + scale * torch.from_numpy(numbers).to(wide))
