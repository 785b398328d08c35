"""Collectives over a lossy network: mask the contributions, sum them exactly, mask the results.

A packet that a hop of the algorithm loses (`lossytp.network.routes`) takes elements of some ranks' contributions x_RN
from the sum, or elements of the sum from some ranks' results y_RN:

    for hop, packet in lost on the way to the sum:  x_RN[hop.positions, elements of the packet] = 0
    total_N = x_RN.sum(0)
    y_RN = total_N.expand(R, N)
    for hop, packet in lost on the way back:        y_RN[hop.positions, elements of the packet] = 0

A repair puts other values in place of these zeros. Every process draws all losses of the group itself, so processes
exchange only the exact sum. This holds for rings and trees that repair partial sums on the way, too: a sum is linear in
the contributions. So each row is followed through all hops, and a process needs only the rows of its own ranks.

Shapes: R ranks, L of them in this process, N elements of one message, flattened row-major.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from scipy.linalg import hadamard
from torch import Tensor, nn
from torch.nn.functional import pad

from lossytp.network.checks import check_is, refuse_if
from lossytp.network.losses import NO_PACKETS, Stream
from lossytp.network.lossy_network import TRAINING, WIRE_DTYPES, CommConfig, LossyNetwork
from lossytp.network.repairs import ZERO, Hadamard, Local, Protect, Repair, Rescale, RescaleCounted, Stale, Zero
from lossytp.network.routes import Hop, Hops, Missing, Routes, first_spans
from lossytp.network.scope import NOWHERE, PHASES, Site
from lossytp.parallel.group import RankGroup, check_reaches, nothing_to_wait_for

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RANGES = {"int8": (-128, 127), "fp8": (-448, 448), "int4": (-8, 7)}
NOTHING_MISSING = Missing([], reliable=True)
Memory = dict[tuple[int, int, int], Tensor]  # what last arrived, by message's size, number of hop, position of rank


def all_reduce(x_RN: Tensor, network: LossyNetwork, **comm: Any) -> Tensor:
    """Sum R stacked messages over a lossy network.

    Args:
        x_RN: (ranks, elements), one floating-point message per rank. It is not changed, and no gradient flows through.
        network: its links advance by the packets of the messages.
        comm: settings of `CommConfig.named`, such as `algorithm` and `repair`. `sequence_parallel` does not all-reduce,
            and is refused; so are the repairs "stale", "protect_first" and "protect_layers", which need a model.

    Returns:
        (ranks, elements): the result that each rank holds.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if `x_RN` has another shape or dtype, a name is unknown, or the network can lose nothing of the sum.
    """
    check_is("x_RN", x_RN, Tensor, "stacked messages, such as torch.randn(4, 1000)")
    if x_RN.ndim != 2 or not x_RN.is_floating_point():
        what = f"x_RN is {x_RN.dtype} of shape {tuple(x_RN.shape)}"
        raise ValueError(f"{what}: stack floating-point messages to (ranks, elements)")
    collective = LossyCollective(network, RankGroup(len(x_RN)), CommConfig.named(**comm))
    repair, own_streams = collective.comm.repair, collective.comm.own_streams
    if collective.comm.sequence_parallel:
        raise ValueError("sequence_parallel = True does not all-reduce: leave it out")
    check_reaches(network, collective.group, collective.comm)
    inside = any(network.scope.covers(NOWHERE._replace(phase=phase)) for phase in PHASES)
    fault = "leaves out a sum that is of no layer, module or direction: give only a phase, or no scope"
    refuse_if(not inside, "scope", network.scope, fault)
    fault = "does not work for a single sum, of no model, before which nothing arrived: choose another"
    refuse_if(repair.remembers or repair.knows_model, "repair", str(repair), fault)
    result = collective.sum_(x_RN.detach().clone(memory_format=torch.contiguous_format))
    return result if own_streams else result.expand_as(x_RN).clone()


Lost = tuple[Hops, Missing]  # hops, and what they lost


class Sum(NamedTuple):
    """A sum that is being computed. The losses of its contributions are known already, those of results after `wait`.

    `of_results` is empty if all ranks share the result.
    """

    wait: Callable[[], Tensor]
    of_parts: Lost
    of_results: list[Lost]


@dataclass(eq=False)
class LossyCollective:
    """Exchange messages between the ranks of `group` over `network`.

    `memories` hold what last arrived, for repairs that remember it: by the network's block, then by site.
    """

    network: LossyNetwork
    group: RankGroup
    comm: CommConfig = field(default_factory=CommConfig)
    memories: dict = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_is("network", self.network, LossyNetwork, "one, such as LossyNetwork(Bernoulli(loss_rate=0.01))")
        check_is("group", self.group, RankGroup, "one, such as RankGroup(4)")
        check_is("comm", self.comm, CommConfig, 'one, such as CommConfig.named(algorithm="ring")')
        self.comm.check_fits(self.network.wire)

    def sum_(self, parts: Tensor, site: Site | None = None, unit: int = 1) -> Tensor:
        """Sum `parts` (L, ...), one contribution per local rank, as the network delivers them.

        `parts` is overwritten. With `sequence_parallel` the result is the ranks' shards side by side, each of whole
        `unit`s.

        Returns:
            The sum (...), or each local rank's result (L, ...) if ranks have their own streams.
        """
        return self.begin_sum_(parts, site, unit).wait()

    def begin_sum_(self, parts: Tensor, site: Site | None = None, unit: int = 1) -> Sum:
        """Begin `sum_`, and return without waiting for it."""
        comm, group = self.comm, self.group
        if comm.sequence_parallel:
            site = (site or NOWHERE)._replace(operation="reduce_scatter")
        parts_LN = parts.view(len(parts), -1)
        reduce, gather = comm.algorithm.pair(comm.sequence_parallel)
        if comm.wire_dtype:
            parts_LN.copy_(self._rounded(parts_LN, reduce, unit, len(parts)))
        own_LN = parts_LN.clone() if comm.repair.uses_own_part else None
        hops = reduce(parts_LN.shape[1], group.ranks, unit)
        sends_sums = any(len(hop.positions) > 1 for hop in hops)
        if sends_sums and group.processes > 1 and isinstance(comm.repair.part("select"), Protect):
            parts = group.all_rows(parts)  # no process knows alone what the senders hold
        missing = self._lose_(parts.view(len(parts), -1), hops, site, own_LN)
        total = parts.sum(0) if len(parts) > 1 else parts[0]
        wait = group.begin_sum_(total) if len(parts) == len(group.local) else nothing_to_wait_for
        of_results: list[Lost] = []

        def finish() -> Tensor:
            wait()
            if comm.wire_dtype and not comm.sequence_parallel:  # else each rank keeps its shard
                total.copy_(self._rounded(total, gather))
            if not comm.own_streams:
                return total
            results = total.expand(len(group.local), *total.shape).clone()
            back = gather(parts_LN.shape[1], group.ranks, unit)
            gathering = (site or NOWHERE)._replace(phase="gather")
            of_results.append(
                (back, self._lose_(results.view(len(results), -1), back, gathering, own_LN, in_gather=True))
            )
            return results

        return Sum(finish, (hops, missing), of_results)

    def all_gather(self, x: Tensor, site: Site | None = None, unit: int = 1, *, reliable: bool | None = None) -> Tensor:
        """Gather `x` (...), of which each rank holds one chunk. Return each local rank's copy of it, (L, ...).

        If the gather is reliable, as `comm` says where `reliable` is None, all copies are the same memory.
        """
        copies = self._rounded(x, self.comm.algorithm.all_gather, unit).expand(len(self.group.local), *x.shape)
        if self.comm.reliable_gather if reliable is None else reliable:
            return copies
        copies = copies.clone(memory_format=torch.contiguous_format)
        copies_LN = copies.view(len(copies), -1)
        hops = self.comm.algorithm.all_gather(copies_LN.shape[1], self.group.ranks, unit)
        gathering = (site or NOWHERE)._replace(operation="all_gather", phase="gather")
        self._lose_(copies_LN, hops, gathering, in_gather=True)
        return copies

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Round nothing for sending within the block."""
        rounding = self.comm
        self.comm = replace(rounding, wire_dtype=None)
        try:
            yield
        finally:
            self.comm = rounding

    def adjoint_(self, gradients: Tensor, hops: Hops, missing: Missing, *, in_gather: bool = False) -> None:
        """Turn the gradient of a sum, repeated (L, ...), into those of its contributions, in place, the last hop first.

        In a gather phase, turn the gradients of the ranks' results into those of the sum.

        Except for `Local`, a hop is a symmetric linear map of each row. These maps do not commute if Hadamard's blocks
        are padded. What a repair remembers comes from earlier messages, so no gradient flows to it.
        """
        if not missing.reliable:
            message = self._message(gradients.view(len(gradients), -1), hops[::-1], missing.backwards())
            message = message._replace(in_gather=in_gather)
            _fill_(message, ZERO if message.repair.remembers else message.repair.part("fill"))

    def memories_state(self) -> list:
        """Return what the repair remembers from training, as lists and tensors."""
        memories = self.memories.get(TRAINING, {})
        return [[site and tuple(site), list(memory.items())] for site, memory in memories.items()]

    def load_memories_state(self, state: list, device: torch.device) -> None:
        """Resume from `memories_state()`."""
        self.memories[TRAINING] = {
            site and Site(*site): {key: last.to(device) for key, last in memory} for site, memory in state
        }

    def _lose_(
        self, rows_LN: Tensor, hops: Hops, site: Site | None, own_LN: Tensor | None = None, *, in_gather: bool = False
    ) -> Missing:
        """Send the rows over `hops`, and leave in them what arrives."""
        network, repair = self.network, self.comm.repair
        if self.comm.control == "noise":
            _add_noise_(self._message(rows_LN, hops, NOTHING_MISSING), self.group.name, site)
            return NOTHING_MISSING
        block = self.comm.block(rows_LN.element_size())
        missing = network.send(hops, *block, repair=repair, group=self.group.name, site=site)
        memory = self._memory(site) if repair.remembers else None
        message = self._message(rows_LN, hops, missing)._replace(in_gather=in_gather, own_LN=own_LN, memory=memory)
        return apply_losses_(message)

    def _message(self, rows_LN: Tensor, hops: Hops, missing: Missing) -> "Message":
        capacity = self.network.wire.elements_per_packet(*self.comm.block(rows_LN.element_size()))
        positions = self.group.local if len(rows_LN) == len(self.group.local) else range(self.group.size)
        ranks, repair = self.group.ranks, self.comm.repair
        return Message(rows_LN, positions, ranks, hops, missing, self.network, capacity, repair)

    def _rounded(self, message: Tensor, routes: Routes, unit: int = 1, rows: int = 1) -> Tensor:
        """Round what these routes send to what the wire's dtype can hold, and keep the message's own dtype."""
        wire_dtype = self.comm.wire_dtype
        if wire_dtype in RANGES:
            rows_LN = message.reshape(rows, -1)
            return quantised(rows_LN, wire_dtype, routes(rows_LN.shape[1], self.group.ranks, unit)).view(message.shape)
        return message.to(DTYPES[wire_dtype]).to(message.dtype) if wire_dtype else message

    def _memory(self, site: Site | None) -> Memory:
        """Return what last arrived of the messages of this site. Each block of evaluation has its own memory."""
        block = self.network.block
        for other in [kept for kept in self.memories if kept[0] == block[0] and kept != block]:
            del self.memories[other]
        memory: Memory = self.memories.setdefault(block, {}).setdefault(site, {})
        return memory


def quantised(rows_LN: Tensor, wire_dtype: str, hops: Hops) -> Tensor:
    """Return the rows as their receivers decode them: in blocks of 32 elements, numbers times the block's scale.

    The element of the largest magnitude becomes the lowest number, -8 in int4, as in vLLM's QuickReduce
    (csrc/quickreduce). "fp8" has e4m3 numbers up to 448, as in FlashInfer's `comm.quantized_all_reduce`. Both run
    `direct`, in blocks of 32 and 256 elements. A scale is a bfloat16, because float16 has none for small gradients.
    Blocks begin where a hop's packets do, and a packet carries whole blocks and their scales.

    Each contribution is rounded once, also the part that a rank sums itself, and so are the sum of an all-reduce and
    each chunk of an all-gather. With `direct` this is all that crosses a link. Partial sums on their way, which real
    systems round at every hop, and what a repair encodes are not rounded again. No gradient knows of the rounding.
    """
    block, (lowest, highest), result_LN = WIRE_DTYPES[wire_dtype][1], RANGES[wire_dtype], torch.empty_like(rows_LN)
    for start, stop in first_spans(hops, rows_LN.shape[1]):
        span_LN = rows_LN[:, start:stop].to(torch.promote_types(rows_LN.dtype, torch.float32))
        values_LBE = pad(span_LN, (0, -(stop - start) % block)).view(len(rows_LN), -1, block)
        low_LB1, high_LB1 = values_LBE.aminmax(dim=2, keepdim=True)
        scale_LB1 = (torch.where(high_LB1 > -low_LB1, high_LB1, low_LB1) / lowest).bfloat16().to(span_LN.dtype)
        numbers_LBE = (values_LBE / scale_LB1.masked_fill(scale_LB1 == 0, 1)).clamp_(lowest, highest)
        numbers_LBE = numbers_LBE.to(torch.float8_e4m3fn).to(span_LN) if wire_dtype == "fp8" else numbers_LBE.round_()
        result_LN[:, start:stop] = (numbers_LBE * scale_LB1).flatten(1)[:, : stop - start]
    return result_LN


def collective_of(model: nn.Module) -> LossyCollective | None:
    """Return the collective that all of the project's layers share; None if the model has no such layer."""
    found = (getattr(each, "collective", None) for each in model.modules())
    return next((each for each in found if isinstance(each, LossyCollective)), None)


class Message(NamedTuple):
    """One message that has crossed its hops, before its repair.

    `rows_LN[i]` belongs to the rank at `positions[i]` of the group whose global ranks are `ranks`. The rows are
    contributions in a reduce phase and results in a gather phase.
    """

    rows_LN: Tensor
    positions: Sequence[int]
    ranks: Sequence[int]
    hops: Hops
    missing: Missing  # what `network.send` returned for the hops
    network: LossyNetwork  # has the loss rates, the tape and the seed of Hadamard's signs
    capacity: int  # elements per packet
    repair: Repair
    in_gather: bool = False
    own_LN: Tensor | None = None  # the ranks' own contributions from before the sum, for repairs that use them
    memory: Memory | None = None  # for repairs that remember what last arrived; updated unless the tape replays
    first_hop: int = 0  # the number that the first of `hops` has in the whole message

    def rows_of(self, positions: Sequence[int]) -> list[int]:
        """Return the rows of those of the positions that are in this process."""
        if len(self.positions) == len(self.ranks):
            return list(positions)
        return [self.positions.index(position) for position in positions if position in self.positions]

    def lost(self) -> Iterator[tuple[Hop, np.ndarray, list[int]]]:
        """Yield each hop, its missing packets, counted over all packets of the hop, and the rows that lack them."""
        for hop, packets, protected in zip(self.hops, self.missing.packets, self.protected(), strict=True):
            counted = self.unprotected(hop, protected)[packets] if len(protected) else packets
            yield hop, counted, self.rows_of(hop.positions)

    def protected(self) -> Sequence[np.ndarray]:
        """Return the numbers of the packets of each hop that were sent reliably."""
        return self.missing.protected or [NO_PACKETS] * len(self.hops)

    def unprotected(self, hop: Hop, protected: np.ndarray) -> np.ndarray:
        """Return the numbers of the other packets of a hop."""
        return np.delete(np.arange(hop.num_packets(self.capacity)), protected)

    def spans(self, hop: Hop, packets: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield the elements [start, stop) of each packet."""
        for packet in packets.tolist():
            start = hop.start + packet * self.capacity
            yield start, min(start + self.capacity, hop.stop)


def apply_losses_(message: Message) -> Missing:
    """Remove from the rows what their message lacks, and repair it, in place.

    Return what it lacks, with the packets that `protect` chose.
    """
    missing, protect, fill = message.missing, message.repair.part("select"), message.repair.part("fill")
    if missing.reliable:
        return missing
    if not isinstance(protect, Protect):
        _fill_(message, fill)
        return missing
    chosen = []
    for number, hop in enumerate(message.hops):  # a sender chooses by what it holds after the earlier hops
        chosen.append(_protected(message, hop, protect))
        of_hop = Missing([missing.packets[number]], protected=[chosen[-1]])
        _fill_(message._replace(hops=(hop,), missing=of_hop, first_hop=number), fill)
    return missing._replace(protected=chosen)


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


def _add_noise_(message: Message, group: str, site: Site | None) -> None:
    """Add white Gaussian noise, of variance p times the mean square, to what crosses a link of loss rate p.

    Zero-filling lost packets gives the same expected squared error: p times the sum of the squares. So this control
    shows whether the form of the damage matters. Another, independent lost elements, is `Wire(elements=1)`.
    """
    network = message.network
    normals = network.normals(message.hops, group=group, site=site)
    for hop, numbers in zip(message.hops, normals, strict=False):  # none if the network is reliable
        for row in message.rows_of(hop.positions):
            span = message.rows_LN[row, hop.start : hop.stop]
            wide = span.double()  # squares of fp16 would overflow or vanish
            scale = math.sqrt(network.loss_rate(hop.src, hop.dst)) * wide.square().mean().sqrt()
            span.copy_(wide + scale * torch.from_numpy(numbers).to(wide))


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


def _fill_(message: Message, repair: Repair) -> None:
    fill = next((FILLS[kind] for kind in type(repair).__mro__ if kind in FILLS), None)
    if fill is None:
        fix = f"decorate one with fills({type(repair).__name__})"
        raise ValueError(f"repair = {repair} has no function that fills in: {fix}")
    fill(message, repair)


@fills(Zero)
def zero_(message: Message, repair: Repair) -> None:
    """Set what is missing to zero."""
    lost = [(row, hop, packets) for hop, packets, here in message.lost() if len(packets) for row in here]
    if lost:
        counts = [len(packets) for _, _, packets in lost]
        rows, firsts, stops = np.repeat([(row, hop.start, hop.stop) for row, hop, _ in lost], counts, axis=0).T
        starts = firsts + np.concatenate([packets for _, _, packets in lost]) * message.capacity
        _zero_spans_(message.rows_LN, rows, starts, np.minimum(starts + message.capacity, stops))


@fills(Rescale)
def rescale_(message: Message, repair: Rescale) -> None:
    """Scale what crossed each hop, and set what is missing to zero."""
    deliver = message.repair.part("deliver")
    for hop, protected in zip(message.hops, message.protected(), strict=True):
        weight = repair.weight(deliver.missing_rate(message.network.loss_rate(hop.src, hop.dst)))
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
    for hop, packets, _ in message.lost():
        for start, stop in message.spans(hop, packets):
            lost_RN[list(hop.positions), start:stop] = True
    lost_N = lost_RN.sum(0)
    elements = np.flatnonzero((lost_N > 0) & (lost_N < size))
    factor = torch.from_numpy(size / (size - lost_N[elements])).to(rows_LN)
    rows_LN[:, torch.from_numpy(elements).to(factor.device)] *= factor


@fills(Stale)
def stale_(message: Message, repair: Stale) -> None:
    """Fill in what last arrived, and remember what arrived now. A replay repeats the first result."""
    tape, memory, size = message.network.tape, message.memory, message.rows_LN.shape[1]
    assert memory is not None
    replayed = iter(tape.next()) if tape is not None and tape.replaying else None
    put_in = []
    if replayed is None:  # forget messages of another size, and ranks that another layout had in this process
        for key in [key for key in memory if key[0] != size or key[2] not in message.positions]:
            del memory[key]
    for number, (hop, packets, rows) in enumerate(message.lost(), message.first_hop):
        for row in rows:
            arrived = message.rows_LN[row, hop.start : hop.stop]
            key = (size, number, message.positions[row])
            last = memory.get(key)
            if last is None or last.shape != arrived.shape or last.dtype != arrived.dtype:
                last = torch.zeros_like(arrived)
            for start, stop in message.spans(hop, packets):
                span = slice(start - hop.start, stop - hop.start)
                put_in.append(last[span] if replayed is None else next(replayed))
                arrived[span] = put_in[-1]
            if replayed is None:
                memory[key] = arrived.clone()
    if tape is not None and replayed is None:
        tape.record(put_in)


@fills(Local)
def local_(message: Message, repair: Local) -> None:
    """Fill in the receiver's own contribution."""
    rows_LN, own_LN = message.rows_LN, message.own_LN
    if own_LN is None:
        zero_(message, repair)
        return
    for hop, packets, lacking in message.lost():
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
        sent = [message.rows_LN[row, hop.start : hop.stop] for row in rows]
        if not len(protected):
            remove_coefficients_(sent, packets, repair, capacity, seed)
            continue
        num_packets, length = hop.num_packets(capacity), len(sent[0])
        others = on_device(message.unprotected(hop, protected), sent[0].device)
        sent_LPC = pad(torch.stack(sent), (0, num_packets * capacity - length)).view(len(rows), num_packets, capacity)
        others_LN = sent_LPC[:, others].view(len(rows), -1)
        remove_coefficients_(list(others_LN), packets, repair, capacity, seed)
        sent_LPC[:, others] = others_LN.view(len(rows), -1, capacity)
        message.rows_LN[rows, hop.start : hop.stop] = sent_LPC.view(len(rows), -1)[:, :length]


def remove_coefficients_(sent: list[Tensor], packets: np.ndarray, repair: Hadamard, capacity: int, seed: int) -> None:
    """Remove from rows (N,) the coefficients of Hadamard's transform that the missing `packets` carry.

    The elements get random signs, and B blocks of S elements are transformed. Coefficient i of block j is number
    i * B + j on the wire, so a packet of `capacity` elements carries at most one coefficient of a block. Only the A
    blocks that lack one are computed.
    """
    length, dtype, device = len(sent[0]), sent[0].dtype, sent[0].device
    size = repair.block_for(length, capacity)
    blocks = -(-length // size)
    numbers = (packets[:, None] * capacity + np.arange(capacity)).ravel()  # of lost coefficients, on the wire
    coefficient, block = np.divmod(numbers[: np.searchsorted(numbers, size * blocks)], blocks)
    has_lost = np.bincount(block, minlength=blocks) > 0
    affected, block = np.flatnonzero(has_lost), (np.cumsum(has_lost) - 1)[block]
    rows = np.resize(affected, max(len(affected), min(blocks, 32)))  # a product of fewer rows rounds differently
    affected_A, lost, rows_A = (on_device(each, device) for each in (affected, block * size + coefficient, rows))
    matrix = _hadamard_matrix(size, dtype, device)
    signs_AS = signs_of(seed, blocks * size, dtype, device).view(blocks, size)[rows_A]
    for sent_N in sent:
        values_BS = pad(sent_N, (0, blocks * size - length)).view(blocks, size)
        coefficients_AS = (values_BS[rows_A] * signs_AS) @ matrix
        coefficients_AS.view(-1).index_fill_(0, lost, 0)
        back_AS = (coefficients_AS @ matrix).mul_(signs_AS)
        sent_N.copy_(values_BS.index_copy_(0, affected_A, back_AS[: len(affected)]).view(-1)[:length])


@lru_cache(maxsize=16)  # this and the signs stay in the device's memory
def _hadamard_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return Sylvester's matrix, orthonormal and symmetric: its own inverse."""
    return torch.from_numpy(hadamard(size) / size**0.5).to(device, dtype)


def signs_of(seed: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the first `count` signs of the seed's stream."""
    return _more_signs(seed, 1 << (count - 1).bit_length(), dtype, device)[:count]


@lru_cache(maxsize=8)
def _more_signs(seed: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    signs = np.where(Stream((seed, "hadamard")).uniforms(count) < 0.5, -1.0, 1.0)
    return torch.from_numpy(signs).to(device, dtype)  # exact in any dtype


FEW_SPANS = 2000  # up to this number, a loop over numpy slices is fastest


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


def on_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Return the numbers on the device. From pinned memory, a GPU fetches them while the processor goes on."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
