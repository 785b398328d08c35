"""All-reduce over a lossy network, evaluated from the losses alone.

Every algorithm comes down to which of a rank's elements survive to the sum, followed by an exact sum
(`lossytp.network.routes`). Its gather phase is reliable.

Shapes: R ranks, N elements of one message, flattened row-major.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lossytp.network.counters import Site
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.repair import Repair, repair_named
from lossytp.network.routes import Hop, LostSpans, reduce_routes
from lossytp.parallel.group import VirtualRanks

Group = VirtualRanks


@dataclass(frozen=True)
class LossyAllReduce:
    """How the ranks of `group` sum their messages over `network`.

    Raises ValueError for an unknown algorithm or repair, and for `reliable_gather=False`, which lets replicas diverge.
    """

    network: LossyNetwork
    group: Group
    algorithm: str = "direct"
    repair: str = "zero"
    reliable_gather: bool = True

    def __post_init__(self) -> None:
        reduce_routes(self.algorithm)
        repair_named(self.repair)
        if not self.reliable_gather:
            raise ValueError("reliable_gather = False (replicas that diverge) is not supported: leave it True")

    def sum_(self, parts: Tensor, site: Site | None = None) -> Tensor:
        """Sum `parts` (R, ...), one contribution a rank, as the network delivers them; returns (...).

        `parts` is overwritten: its lost elements with zero, the others scaled as the repair says. One element is
        `parts`' own dtype on the wire.
        """
        parts_RN = parts.view(len(parts), -1)
        hops = reduce_routes(self.algorithm)(parts_RN.shape[1], self.group.ranks)
        spans = self.network.lost_spans(hops, parts.element_size(), group=self.group.name, site=site)
        if not spans.reliable:
            _scale_(parts_RN, hops, repair_named(self.repair), self.network)
            _zero_spans_(parts_RN, spans)
        return parts.sum(0)


def all_reduce(
    x_RN: Tensor,
    network: LossyNetwork,
    *,
    algorithm: str = "direct",
    repair: str = "zero",
    reliable_gather: bool = True,
) -> Tensor:
    """Sum R stacked messages over a lossy network.

    Args:
        x_RN: (ranks, elements), one floating-point message a rank; not changed, and not differentiated through.
        network: advanced by the packets the messages fill.
        algorithm: "sender" or "direct", see `lossytp.network.routes`.
        repair: "zero" or "rescale", see `lossytp.network.repair`.
        reliable_gather: must be True.

    Returns:
        (ranks, elements): the result that each rank holds.
    """
    if x_RN.ndim != 2 or not x_RN.is_floating_point():
        raise ValueError(
            f"x_RN is {x_RN.dtype} of shape {tuple(x_RN.shape)}: stack floating-point messages to (ranks, elements)"
        )
    collective = LossyAllReduce(network, VirtualRanks(len(x_RN)), algorithm, repair, reliable_gather)
    return collective.sum_(x_RN.detach().clone(memory_format=torch.contiguous_format)).expand_as(x_RN).clone()


def _scale_(parts_RN: Tensor, hops: tuple[Hop, ...], repair: Repair, network: LossyNetwork) -> None:
    """Scale what crosses each hop as the repair says."""
    for hop in hops:
        weight = repair.weight(network.process(hop.src, hop.dst).loss_rate)
        if weight != 1:
            for row in hop.carries:
                parts_RN[row, hop.start : hop.stop] *= weight


def _zero_spans_(parts_RN: Tensor, spans: LostSpans) -> None:
    """Set elements [start, stop) of row r to zero for every span."""
    if not spans.rows:
        return
    if parts_RN.device.type == "cpu":
        bytes_RN: Any = parts_RN.view(torch.uint8).numpy()  # numpy slices cost a tenth of torch's, in any dtype
        size = parts_RN.element_size()
        for row, start, stop in zip(spans.rows, spans.starts, spans.stops, strict=True):
            bytes_RN[row, start * size : stop * size] = 0
        return
    # on a device: +1 at each start, -1 at each stop, and the running sum is positive inside a span
    rows, starts, stops = torch.tensor([spans.rows, spans.starts, spans.stops], device=parts_RN.device)
    edges = torch.zeros(parts_RN.shape[0], parts_RN.shape[1] + 1, dtype=torch.int32, device=parts_RN.device)
    one = torch.ones_like(rows, dtype=torch.int32)
    edges.index_put_((rows, starts), one, accumulate=True)
    edges.index_put_((rows, stops), -one, accumulate=True)
    parts_RN.masked_fill_(edges.cumsum(1)[:, :-1] > 0, 0)
