"""All-reduce over a lossy network, evaluated from the losses alone.

Every algorithm comes down to which of a rank's elements survive to the sum, followed by an exact sum
(`lossytp.network.routes`). Its gather phase is reliable. Every process works out all losses of the group by itself,
so the only messages between processes are those of the sum.

Shapes: R ranks, L of them in this process, N elements of one message, flattened row-major.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lossytp.network.counters import Site
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.repair import Repair, repair_named
from lossytp.network.routes import Hop, LostSpans, algorithm_named
from lossytp.parallel.group import RankGroup


@dataclass(frozen=True)
class LossyAllReduce:
    """How the ranks of `group` sum their messages over `network`.

    Raises ValueError for an unknown algorithm or repair, and for `reliable_gather=False`, which lets replicas diverge.
    """

    network: LossyNetwork
    group: RankGroup
    algorithm: str = "direct"
    repair: str = "zero"
    reliable_gather: bool = True

    def __post_init__(self) -> None:
        algorithm_named(self.algorithm)
        repair_named(self.repair)
        if not self.reliable_gather:
            raise ValueError("reliable_gather = False (replicas that diverge) is not supported: leave it True")

    def sum_(self, parts: Tensor, site: Site | None = None) -> Tensor:
        """Sum `parts` (L, ...), one contribution a local rank, as the network delivers them; returns (...).

        `parts` is overwritten: its lost elements with zero, the others scaled as the repair says. One element is
        `parts`' own dtype on the wire.
        """
        total, wait = self.begin_sum_(parts, site)
        wait()
        return total

    def begin_sum_(self, parts: Tensor, site: Site | None = None) -> tuple[Tensor, Callable[[], object]]:
        """As `sum_`, but returns at once: the sum is complete when the returned function has been called."""
        parts_LN = parts.view(len(parts), -1)
        hops = algorithm_named(self.algorithm).reduce(parts_LN.shape[1], self.group.ranks)
        spans = self.network.lost_spans(hops, parts.element_size(), group=self.group.name, site=site)
        lose_(parts_LN, self.group.local, hops, spans, repair_named(self.repair), self.network)
        total = parts.sum(0) if len(parts) > 1 else parts[0]
        return total, self.group.begin_sum_(total)


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
    collective = LossyAllReduce(network, RankGroup(len(x_RN)), algorithm, repair, reliable_gather)
    return collective.sum_(x_RN.detach().clone(memory_format=torch.contiguous_format)).expand_as(x_RN).clone()


def lose_(
    parts_LN: Tensor,
    positions: Sequence[int],
    hops: tuple[Hop, ...],
    spans: LostSpans,
    repair: Repair,
    network: LossyNetwork,
) -> None:
    """Take from `parts_LN` what the network lost, and scale the rest as the repair says.

    Row i belongs to the rank at `positions[i]` of the group; what other ranks lack is not looked at.
    """
    if not spans.reliable:
        _scale_(parts_LN, positions, hops, repair, network)
        _zero_spans_(parts_LN, positions, spans)


def _scale_(
    parts_LN: Tensor, positions: Sequence[int], hops: tuple[Hop, ...], repair: Repair, network: LossyNetwork
) -> None:
    """Scale what crosses each hop as the repair says."""
    for hop in hops:
        weight = repair.weight(network.process(hop.src, hop.dst).loss_rate)
        if weight != 1:
            for position in hop.positions:
                if position in positions:
                    parts_LN[positions.index(position), hop.start : hop.stop] *= weight


def _zero_spans_(parts_LN: Tensor, positions: Sequence[int], spans: LostSpans) -> None:
    """Set elements [start, stop) to zero for every span of a rank at one of the positions."""
    row_at = {position: row for row, position in enumerate(positions)}
    lost = zip(spans.rows, spans.starts, spans.stops, strict=True)
    here = [(row_at[position], start, stop) for position, start, stop in lost if position in row_at]
    if not here:
        return
    if parts_LN.device.type == "cpu":
        bytes_LN: Any = parts_LN.view(torch.uint8).numpy()  # numpy slices cost a tenth of torch's, in any dtype
        size = parts_LN.element_size()
        for row, start, stop in here:
            bytes_LN[row, start * size : stop * size] = 0
        return
    # on a device: +1 at each start, -1 at each stop, and the running sum is positive inside a span
    rows, starts, stops = torch.tensor(here, device=parts_LN.device).t()
    edges = torch.zeros(parts_LN.shape[0], parts_LN.shape[1] + 1, dtype=torch.int32, device=parts_LN.device)
    one = torch.ones_like(rows, dtype=torch.int32)
    edges.index_put_((rows, starts), one, accumulate=True)
    edges.index_put_((rows, stops), -one, accumulate=True)
    parts_LN.masked_fill_(edges.cumsum(1)[:, :-1] > 0, 0)
