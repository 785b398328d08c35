"""The tensor side of `lossytp.network.repairs`: what replaces missing packets.

A sum is linear in the ranks' contributions, even if a ring or a tree repairs partial sums on the way. So each row here
is one rank's contribution, followed through all hops, and a process needs only the rows of its own ranks.

Shapes: R ranks, L of them in this process, N elements of one message, flattened row-major.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lossytp.network.bernoulli import NO_PACKETS
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.repairs import ZERO, Hadamard, Local, Protect, Repair, Rescale, RescaleCounted, Stale, Zero
from lossytp.network.repairs.chain import stage_of
from lossytp.network.routes import Hop, Hops, Missing
from lossytp.parallel.hadamard import on_device, without_coefficients

Memory = dict[tuple[int, int, int], Tensor]
"""What last arrived, by the size of the message, the number of the hop and the position of the rank."""
FEW_SPANS = 2000  # up to this number, a loop over numpy slices is fastest


class Message(NamedTuple):
    """One message that has crossed its hops, before its repair.

    `rows_LN[i]` belongs to the rank at `positions[i]` of the group whose global ranks are `ranks`. The rows are
    contributions in a reduce phase and results in a gather phase.
    """

    rows_LN: Tensor
    positions: Sequence[int]
    ranks: Sequence[int]
    hops: Hops
    missing: Missing
    """What `network.send` returned for the hops."""
    network: LossyNetwork
    """The network that the message crossed. It has the loss rates, the tape and the seed of Hadamard's signs."""
    capacity: int
    """Elements per packet."""
    in_gather: bool = False
    own_LN: Tensor | None = None
    """The ranks' own contributions from before the sum, for repairs that use them; None if there are none."""
    memory: Memory | None = None
    """What last arrived, for repairs that remember it. It is updated unless the network's tape replays."""
    deliver: Repair = ZERO
    """The repair that has restored some of the packets that links lost."""
    first_hop: int = 0
    """The number that the first of `hops` has in the whole message."""

    def rows_of(self, positions: Sequence[int]) -> list[int]:
        """Return the rows of those of the positions that are in this process."""
        return [self.positions.index(position) for position in positions if position in self.positions]

    def lost(self) -> Iterator[tuple[Hop, np.ndarray]]:
        """Yield each hop and the numbers of its missing packets, counted over all packets of the hop."""
        for hop, packets, protected in zip(self.hops, self.missing.packets, self.protected(), strict=True):
            others = np.delete(np.arange(hop.num_packets(self.capacity)), protected) if len(protected) else None
            yield hop, packets if others is None else others[packets]

    def lacking(self) -> Iterator[tuple[Hop, np.ndarray, list[int]]]:
        """Yield each hop whose losses affect rows of this process: the hop, its missing packets and the rows."""
        for hop, packets in self.lost():
            rows = self.rows_of(hop.positions) if len(packets) else []
            if rows:
                yield hop, packets, rows

    def protected(self) -> Sequence[np.ndarray]:
        """Return the numbers of the packets of each hop that were sent reliably."""
        return self.missing.protected or [NO_PACKETS] * len(self.hops)

    def spans(self, hop: Hop, packets: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield the elements [start, stop) of each packet."""
        for packet in packets.tolist():
            start = hop.start + packet * self.capacity
            yield start, min(start + self.capacity, hop.stop)


Fill = Callable[[Message, Any], None]
FILLS: dict[type[Repair], Fill] = {}
"""How each repair fills in what a message lacks. Other repairs use the function of their nearest listed base class."""
AnyFill = TypeVar("AnyFill", bound=Fill)


def fills(kind: type[Repair]) -> Callable[[AnyFill], AnyFill]:
    """Return a decorator that registers a function as the fill of repairs of this `kind`."""

    def register(fill: AnyFill) -> AnyFill:
        FILLS[kind] = fill
        return fill

    return register


def settle_(message: Message, repair: Repair) -> Missing:
    """Remove from the rows what their message lacks, and repair it, in place.

    Returns:
        What the message lacks, with the packets that `protect` chose.

    Raises:
        ValueError: if no function is registered for the repair.
    """
    if message.missing.reliable:
        return message.missing
    protect, fill = stage_of(repair, "select"), stage_of(repair, "fill")
    message = message._replace(deliver=stage_of(repair, "deliver"))
    if not isinstance(protect, Protect):
        _fill_(message, fill)
        return message.missing
    chosen = []
    for number, hop in enumerate(message.hops):  # a sender chooses by what it holds after the earlier hops
        chosen.append(_protected(message, hop, protect))
        missing = Missing([message.missing.packets[number]], protected=[chosen[-1]])
        _fill_(message._replace(hops=(hop,), missing=missing, first_hop=number), fill)
    return message.missing._replace(protected=chosen)


def _fill_(message: Message, repair: Repair) -> None:
    fill = next((FILLS[kind] for kind in type(repair).__mro__ if kind in FILLS), None)
    if fill is None:
        raise ValueError(
            f"repair = {repair} has no function that fills in: decorate one with fills({type(repair).__name__})"
        )
    fill(message, repair)


def _protected(message: Message, hop: Hop, protect: Protect) -> np.ndarray:
    """Return the packets of a hop that its sender protects, by the sum of the rows, or in a gather by one of them."""
    rows, num_packets = message.rows_of(hop.positions), hop.num_packets(message.capacity)
    if not rows:
        return NO_PACKETS
    if protect.by != "norm":
        return protect.protected(np.zeros(num_packets), message.network.seed)
    held_LN = message.rows_LN[rows[:1] if message.in_gather else rows, hop.start : hop.stop]
    held_N = held_LN[0] if len(held_LN) == 1 else held_LN.sum(0)
    squares_N = held_N.to(torch.float64 if held_N.dtype == torch.float64 else torch.float32).square()
    squares_PC = pad(squares_N, (0, num_packets * message.capacity - len(squares_N))).view(num_packets, -1)
    return protect.protected(squares_PC.sum(1).cpu().numpy(), message.network.seed)


def adjoint_(message: Message, repair: Repair) -> None:
    """Apply the adjoint of `settle_` to the contributions' gradients, the last hop first.

    Except for `Local`, a hop is a symmetric linear map of each row. These maps do not commute if Hadamard's blocks are
    padded. What a repair remembers comes from earlier messages, so no gradient flows to it.
    """
    if message.missing.reliable:
        return
    message = message._replace(deliver=stage_of(repair, "deliver"))
    fill = ZERO if repair.remembers else stage_of(repair, "fill")
    _fill_(message._replace(hops=message.hops[::-1], missing=message.missing.backwards()), fill)


@fills(Zero)
def zero_(message: Message, repair: Repair) -> None:
    """Set what is missing to zero."""
    rows, starts, stops = [], [], []
    for hop, packets, here in message.lacking():
        first = hop.start + packets * message.capacity
        for row in here:
            rows.append(np.full(len(packets), row))
            starts.append(first)
            stops.append(np.minimum(first + message.capacity, hop.stop))
    if rows:
        _zero_spans_(message.rows_LN, *(np.concatenate(parts) for parts in (rows, starts, stops)))


def _zero_spans_(rows_LN: Tensor, rows: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> None:
    """Set elements [starts[i], stops[i]), at least one, of row rows[i] of contiguous rows to zero."""
    if rows_LN.device.type == "cpu" and len(rows) <= FEW_SPANS:
        bytes_LN: Any = rows_LN.view(torch.uint8).numpy()  # numpy slices cost a tenth of torch's, in any dtype
        size = rows_LN.element_size()
        for row, start, stop in zip(rows.tolist(), (starts * size).tolist(), (stops * size).tolist(), strict=True):
            bytes_LN[row, start:stop] = 0
        return
    # all at once: a row of numbers for each span, in which short spans repeat their last element
    before = rows * rows_LN.shape[1]
    first, last = (on_device(before + each, rows_LN.device) for each in (starts, stops))
    longest = torch.arange(int((stops - starts).max()), device=rows_LN.device)
    elements = torch.minimum(first[:, None] + longest, last[:, None] - 1)
    rows_LN.view(-1).index_fill_(0, elements.view(-1), 0)


@fills(Rescale)
def rescale_(message: Message, repair: Rescale) -> None:
    """Scale what crossed each hop, and set what is missing to zero."""
    for hop, protected in zip(message.hops, message.protected(), strict=True):
        loss_rate = message.network.loss_rate(hop.src, hop.dst)
        weight = repair.weight(message.deliver.missing_rate(loss_rate))
        for row in message.rows_of(hop.positions) if weight != 1 else ():
            crossed_N = message.rows_LN[row, hop.start : hop.stop]
            scaled_N = crossed_N * weight
            for packet in protected.tolist():  # these certainly arrive
                span = slice(packet * message.capacity, (packet + 1) * message.capacity)
                scaled_N[span] = crossed_N[span]
            crossed_N.copy_(scaled_N)
    zero_(message, repair)


@fills(RescaleCounted)
def rescale_counted_(message: Message, repair: RescaleCounted) -> None:
    """Scale each element by R / (contributions that arrived). Every process counts those of all ranks."""
    zero_(message, repair)
    if message.in_gather or not message.missing.any:
        return
    rows_LN, size = message.rows_LN, len(message.ranks)
    lost_RN = np.zeros((size, rows_LN.shape[1]), dtype=bool)
    for hop, packets in message.lost():
        for start, stop in message.spans(hop, packets):
            lost_RN[list(hop.positions), start:stop] = True
    lost_N = lost_RN.sum(0)
    elements = np.flatnonzero((lost_N > 0) & (lost_N < size))
    factor = torch.from_numpy(size / (size - lost_N[elements])).to(rows_LN)
    rows_LN[:, torch.from_numpy(elements).to(factor.device)] *= factor


@fills(Stale)
def stale_(message: Message, repair: Stale) -> None:
    """Fill in what last arrived, and remember what arrived now. A replay repeats the first result."""
    tape, memory = message.network.tape, message.memory
    assert memory is not None
    hops = list(message.lost())
    if tape is not None and tape.replaying:
        put_in = iter(tape.next())
        for hop, packets in hops:
            for row in message.rows_of(hop.positions):
                for start, stop in message.spans(hop, packets):
                    message.rows_LN[row, start:stop] = next(put_in)
        return
    size = message.rows_LN.shape[1]
    for other in [place for place in memory if place[0] != size or place[2] not in message.positions]:
        del memory[other]  # of messages of another size, or of ranks that another layout had in this process
    pieces = []
    for number, (hop, packets) in enumerate(hops, message.first_hop):
        for row in message.rows_of(hop.positions):
            arrived = message.rows_LN[row, hop.start : hop.stop]
            place = (size, number, message.positions[row])
            last = memory.get(place)
            if last is None or last.shape != arrived.shape or last.dtype != arrived.dtype:
                last = memory[place] = torch.zeros_like(arrived)
            for start, stop in message.spans(hop, packets):
                span = slice(start - hop.start, stop - hop.start)
                arrived[span] = last[span]
                if tape is not None:
                    pieces.append(last[span].clone())
            last.copy_(arrived)
    if tape is not None:
        tape.record(pieces)


@fills(Local)
def local_(message: Message, repair: Local) -> None:
    """Fill in the receiver's own contribution."""
    rows_LN, own_LN = message.rows_LN, message.own_LN
    if own_LN is None:
        zero_(message, repair)
        return
    for hop, packets in message.lost():
        lacking = message.rows_of(hop.positions)
        sums_up = not message.in_gather and hop.dst in message.ranks
        receiver = message.rows_of([message.ranks.index(hop.dst)]) if sums_up else []
        for start, stop in message.spans(hop, packets):
            for row in lacking:
                rows_LN[row, start:stop] = own_LN[row, start:stop] if message.in_gather else 0
            for row in receiver:
                rows_LN[row, start:stop] += own_LN[row, start:stop]


@fills(Hadamard)
def hadamard_(message: Message, repair: Hadamard) -> None:
    """Set the coefficients in missing packets to zero, and transform back. Complete blocks do not change."""
    capacity, seed = message.capacity, message.network.seed
    for hop, packets, protected in zip(message.hops, message.missing.packets, message.protected(), strict=True):
        rows = message.rows_of(hop.positions) if len(packets) else []
        if not rows:
            continue
        here: Any = rows if len(rows) > 1 else slice(rows[0], rows[0] + 1)  # the processor waits for a GPU after a list
        sent_LN = message.rows_LN[here, hop.start : hop.stop]
        if not len(protected):
            message.rows_LN[here, hop.start : hop.stop] = without_coefficients(sent_LN, packets, repair, capacity, seed)
            continue
        num_packets, length = hop.num_packets(capacity), sent_LN.shape[1]
        others = on_device(np.delete(np.arange(num_packets), protected), sent_LN.device)
        sent_LPC = pad(sent_LN, (0, num_packets * capacity - length)).view(len(rows), num_packets, capacity)
        others_LN = sent_LPC[:, others].view(len(rows), -1)
        kept_LN = without_coefficients(others_LN, packets, repair, capacity, seed)
        sent_LPC[:, others] = kept_LN.view(len(rows), -1, capacity)
        message.rows_LN[here, hop.start : hop.stop] = sent_LPC.view(len(rows), -1)[:, :length]
