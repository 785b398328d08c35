"""What stands where packets are missing: the tensor side of `lossytp.network.repair`.

What a sum becomes is linear in the ranks' contributions, also where a ring or a tree repairs partial sums on the way.
So each row here is one rank's contribution followed through all hops, and a process needs no row but its own ranks'.

Shapes: R ranks, L of them in this process, N elements of one message, flattened row-major; B blocks of S elements.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.linalg import hadamard
from torch import Tensor
from torch.nn.functional import pad

from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.repair import ZERO, Hadamard, Local, Repair, Rescale, RescaleCounted, Stale
from lossytp.network.routes import Hop, Hops, Missing
from lossytp.network.streams import Stream
from lossytp.network.tape import LossTape

Memory = dict[tuple[int, int, int], Tensor]  # by message's size, number of the hop, position: what last arrived
FEW_SPANS = 2000  # up to so many, a loop over numpy slices is the fastest


class Rows(NamedTuple):
    """`rows_LN[i]` belongs to the rank at `positions[i]` of the group whose global ranks are `ranks`."""

    rows_LN: Tensor
    positions: Sequence[int]
    ranks: Sequence[int]

    def of(self, positions: Sequence[int]) -> list[int]:
        """The rows of those of the positions that are here."""
        return [self.positions.index(position) for position in positions if position in self.positions]


def settle_(
    rows: Rows,
    hops: Hops,
    missing: Missing,
    repair: Repair,
    network: LossyNetwork,
    capacity: int,
    *,
    own_LN: Tensor | None = None,
    in_gather: bool = False,
    memory: Memory | None = None,
    tape: LossTape | None = None,
) -> None:
    """Take from the rows what their message lacks, and repair it.

    Args:
        rows: contributions in a reduce phase, results in a gather phase; overwritten.
        hops, missing: the message's way, and what `network.send` said of it.
        repair: what stands in for what is missing.
        network: that the message crossed; `Rescale` asks it for loss rates, `Hadamard` for the seed of its signs.
        capacity: elements of a packet.
        own_LN: the ranks' own contributions as they were, for `Local`; zeros stand in where there are none.
        in_gather: whether the rows are results.
        memory: what last arrived, for `Stale`; changed, unless `tape` replays.
        tape: where what `Stale` put in is recorded, or comes from again: the memory has gone on meanwhile.
    """
    if missing.reliable:
        return
    if isinstance(repair, Stale):
        assert memory is not None
        _stale_(rows, hops, missing, capacity, memory, tape)
    elif isinstance(repair, Local) and own_LN is not None:
        _local_(rows, hops, missing, capacity, own_LN, in_gather)
    elif isinstance(repair, Hadamard):
        _hadamard_(rows, hops, missing, capacity, repair, network.seed)
    else:
        if isinstance(repair, Rescale):
            _scale_(rows, hops, repair, network)
        _zero_(rows, hops, missing, capacity)
        if isinstance(repair, RescaleCounted) and not in_gather:
            _scale_by_count_(rows, hops, missing, capacity)


def adjoint_(rows: Rows, hops: Hops, missing: Missing, repair: Repair, network: LossyNetwork, capacity: int) -> None:
    """What `settle_` did to contributions, done to their gradients, the last hop first.

    But for `Local`, a hop is a symmetric map of each row; where blocks of Hadamard's are padded, maps do not commute.
    What `Stale` put in came from before, and has no gradient.
    """
    repair = ZERO if isinstance(repair, Stale) else repair
    settle_(rows, hops[::-1], missing._replace(packets=missing.packets[::-1]), repair, network, capacity)


def _spans(hop: Hop, packets: np.ndarray, capacity: int) -> Iterator[tuple[int, int]]:
    """Elements [start, stop) of each packet."""
    for packet in packets.tolist():
        start = hop.start + packet * capacity
        yield start, min(start + capacity, hop.stop)


def _scale_(rows: Rows, hops: Hops, repair: Repair, network: LossyNetwork) -> None:
    for hop in hops:
        weight = repair.weight(network.process(hop.src, hop.dst).loss_rate)
        if weight != 1:
            for row in rows.of(hop.positions):
                rows.rows_LN[row, hop.start : hop.stop] *= weight


def _zero_(rows: Rows, hops: Hops, missing: Missing, capacity: int) -> None:
    rows_, starts, stops = [], [], []
    for hop, packets in zip(hops, missing.packets, strict=True):
        here = rows.of(hop.positions) if len(packets) else []
        for row in here:
            first = hop.start + packets * capacity
            rows_.append(np.full(len(packets), row))
            starts.append(first)
            stops.append(np.minimum(first + capacity, hop.stop))
    if rows_:
        _zero_spans_(rows.rows_LN, *(np.concatenate(parts) for parts in (rows_, starts, stops)))


def _zero_spans_(rows_LN: Tensor, rows: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> None:
    """Set elements [starts[i], stops[i]) of row rows[i] to zero."""
    if rows_LN.device.type == "cpu" and len(rows) <= FEW_SPANS:
        bytes_LN: Any = rows_LN.view(torch.uint8).numpy()  # numpy slices cost a tenth of torch's, in any dtype
        size = rows_LN.element_size()
        for row, start, stop in zip(rows.tolist(), (starts * size).tolist(), (stops * size).tolist(), strict=True):
            bytes_LN[row, start:stop] = 0
        return
    # all at once: +1 at each start, -1 at each stop, and the running sum is positive inside a span
    edges = torch.zeros(rows_LN.shape[0], rows_LN.shape[1] + 1, dtype=torch.int32, device=rows_LN.device)
    index, first, last = (torch.from_numpy(values).to(rows_LN.device) for values in (rows, starts, stops))
    one = torch.ones_like(index, dtype=torch.int32)
    edges.index_put_((index, first), one, accumulate=True)
    edges.index_put_((index, last), -one, accumulate=True)
    rows_LN.masked_fill_(edges.cumsum(1)[:, :-1] > 0, 0)


def _scale_by_count_(rows: Rows, hops: Hops, missing: Missing, capacity: int) -> None:
    """R / (contributions that arrived), element by element; every process counts those of all ranks."""
    if not missing.any:
        return
    size = len(rows.ranks)
    lost_RN = np.zeros((size, rows.rows_LN.shape[1]), dtype=bool)
    for hop, packets in zip(hops, missing.packets, strict=True):
        for start, stop in _spans(hop, packets, capacity):
            lost_RN[list(hop.positions), start:stop] = True
    lost_N = lost_RN.sum(0)
    elements = np.flatnonzero((lost_N > 0) & (lost_N < size))
    factor = torch.from_numpy(size / (size - lost_N[elements])).to(rows.rows_LN)
    rows.rows_LN[:, torch.from_numpy(elements).to(factor.device)] *= factor


def _stale_(rows: Rows, hops: Hops, missing: Missing, capacity: int, memory: Memory, tape: LossTape | None) -> None:
    if tape is not None and tape.replaying:
        put_in = iter(tape.next())
        for hop, packets in zip(hops, missing.packets, strict=True):
            for row in rows.of(hop.positions):
                for start, stop in _spans(hop, packets, capacity):
                    rows.rows_LN[row, start:stop] = next(put_in)
        return
    size = rows.rows_LN.shape[1]
    for other in [place for place in memory if place[0] != size]:
        del memory[other]  # in a message of another size the same number is another hop's, or another piece's
    pieces = []
    for number, (hop, packets) in enumerate(zip(hops, missing.packets, strict=True)):
        for row in rows.of(hop.positions):
            arrived = rows.rows_LN[row, hop.start : hop.stop]
            place = (size, number, rows.positions[row])
            last = memory.get(place)
            if last is None or last.shape != arrived.shape or last.dtype != arrived.dtype:
                last = memory[place] = torch.zeros_like(arrived)
            for start, stop in _spans(hop, packets, capacity):
                span = slice(start - hop.start, stop - hop.start)
                arrived[span] = last[span]
                if tape is not None:
                    pieces.append(last[span].clone())
            last.copy_(arrived)
    if tape is not None:
        tape.record(pieces)


def _local_(rows: Rows, hops: Hops, missing: Missing, capacity: int, own_LN: Tensor, in_gather: bool) -> None:
    for hop, packets in zip(hops, missing.packets, strict=True):
        lacking = rows.of(hop.positions)
        receiver = [] if in_gather else rows.of([rows.ranks.index(hop.dst)] if hop.dst in rows.ranks else [])
        for start, stop in _spans(hop, packets, capacity):
            for row in lacking:
                rows.rows_LN[row, start:stop] = own_LN[row, start:stop] if in_gather else 0
            for row in receiver:
                rows.rows_LN[row, start:stop] += own_LN[row, start:stop]


def _hadamard_(rows: Rows, hops: Hops, missing: Missing, capacity: int, repair: Hadamard, seed: int) -> None:
    """Set the coefficients in missing packets to zero, and go back; blocks that lack none stay as they are.

    Coefficient i of block j is number i * (number of blocks) + j on the wire.
    """
    for hop, packets in zip(hops, missing.packets, strict=True):
        here = rows.of(hop.positions) if len(packets) else []
        if not here:
            continue
        length = hop.stop - hop.start
        size = repair.block_for(length, capacity)
        blocks = -(-length // size)
        wire = (packets[:, None] * capacity + np.arange(min(capacity, size * blocks))).reshape(-1)
        lost = np.zeros(size * blocks, dtype=bool)
        lost[wire[wire < len(lost)]] = True
        lost_BS = torch.from_numpy(np.ascontiguousarray(lost.reshape(size, blocks).T)).to(rows.rows_LN.device)
        affected_B1 = lost_BS.any(1, keepdim=True)
        matrix, signs = _hadamard_matrix(size).to(rows.rows_LN), _signs(seed, blocks * size).to(rows.rows_LN)
        for row in here:
            span = rows.rows_LN[row, hop.start : hop.stop]
            values_BS = pad(span, (0, blocks * size - length)).view(blocks, size)
            coefficients_BS = (values_BS * signs.view(blocks, size)) @ matrix
            coefficients_BS.masked_fill_(lost_BS, 0)
            back_BS = (coefficients_BS @ matrix) * signs.view(blocks, size)
            span.copy_(torch.where(affected_B1, back_BS, values_BS).view(-1)[:length])


@lru_cache(maxsize=16)
def _hadamard_matrix(size: int) -> Tensor:
    """Sylvester's, orthonormal and symmetric: its own inverse."""
    return torch.from_numpy(hadamard(size) / size**0.5)


@lru_cache(maxsize=64)
def _signs(seed: int, count: int) -> Tensor:
    signs = np.where(Stream((seed, "hadamard")).uniforms(count) < 0.5, -1.0, 1.0)
    return torch.from_numpy(signs.astype(np.float32))  # exact in any dtype
