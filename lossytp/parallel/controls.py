"""Add Gaussian noise with packet loss's expected squared error, as a control for studies of packet loss.

It shows whether the form of the damage matters. A second control, independent lost elements, is `Wire(elements=1)`.
"""

import math

import torch

from lossytp.network.counters import Site
from lossytp.parallel.missing import Message


def add_noise_(message: Message, group: str, site: Site | None) -> None:
    """Add white Gaussian noise, of variance p times the mean square, to what crosses a link of loss rate p.

    Zero-filling lost packets gives the same expected squared error: p times the sum of the squares.
    """
    network = message.network
    normals = network.normals(message.hops, group=group, site=site)
    for hop, numbers in zip(message.hops, normals, strict=False):  # none if the network is reliable
        for row in message.rows_of(hop.positions):
            span = message.rows_LN[row, hop.start : hop.stop]
            wide = span.double()  # squares of fp16 would overflow or vanish
            scale = math.sqrt(network.loss_rate(hop.src, hop.dst)) * wide.square().mean().sqrt()
            span.copy_(wide + scale * torch.from_numpy(numbers).to(wide))
