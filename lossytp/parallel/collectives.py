"""Collectives over a lossy network, computed from an exact sum and the losses.

An algorithm decides which elements of each rank survive to the sum, and which results reach each rank
(`lossytp.network.routes`). In between, the sum is exact. Every process computes all losses of the group itself, so
processes exchange only the sum.

Shapes: R ranks, L of them in this process, N elements of one message, flattened row-major.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lossytp.network.checks import check_is
from lossytp.network.counters import NOWHERE, Site
from lossytp.network.link_streams import TRAINING
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.repairs import ZERO
from lossytp.network.repairs.chain import stage_of
from lossytp.network.routes import Hops, Missing
from lossytp.network.scope import PHASES
from lossytp.network.wiring import Wiring
from lossytp.parallel.group import RankGroup, nothing_to_wait_for
from lossytp.parallel.missing import Memory, Message, adjoint_, settle_
from lossytp.parallel.reach import check_reaches

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LossyCollective:
    """Exchange messages between the ranks of `group` over `network`.

    `memories` hold what last arrived, for repairs that remember it: by the network's block, then by site.

    Raises:
        TypeError: if an argument is of another type.
    """

    network: LossyNetwork
    group: RankGroup
    wiring: Wiring = field(default_factory=Wiring)
    memories: dict = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_is("network", self.network, LossyNetwork, "one, such as LossyNetwork(Bernoulli(loss_rate=0.01))")
        check_is("group", self.group, RankGroup, "one, such as RankGroup(4)")
        check_is("wiring", self.wiring, Wiring, 'one, such as Wiring.named(algorithm="ring")')

    def sum_(self, parts: Tensor, site: Site | None = None, unit: int = 1) -> Tensor:
        """Sum `parts` (L, ...), one contribution per local rank, as the network delivers them.

        `parts` is overwritten. With `sequence_parallel` the result is the ranks' shards side by side, each of whole
        `unit`s.

        Returns:
            The sum (...), or each local rank's result (L, ...) if ranks have their own streams.
        """
        return self.begin_sum_(parts, site, unit).wait()

    def begin_sum_(self, parts: Tensor, site: Site | None = None, unit: int = 1) -> "Sum":
        """Begin `sum_`, and return without waiting for it."""
        wiring = self.wiring
        if wiring.sequence_parallel:
            site = (site or NOWHERE)._replace(operation="reduce_scatter")
        parts_LN = parts.view(len(parts), -1)
        parts_LN.copy_(self._rounded(parts_LN))
        own_LN = parts_LN.clone() if wiring.repair.uses_own_part else None
        reduce, gather = wiring.algorithm.pair(wiring.sequence_parallel)
        hops = reduce(parts_LN.shape[1], self.group.ranks, unit)
        if self._chooses_by_partial_sums(hops):
            parts = self.group.all_rows(parts)  # no process knows alone what the senders hold
        missing = self._lose_(parts.view(len(parts), -1), hops, site, own_LN)
        total = parts.sum(0) if len(parts) > 1 else parts[0]
        wait = self.group.begin_sum_(total) if len(parts) == len(self.group.local) else nothing_to_wait_for

        def finish() -> Tensor:
            wait()
            if not wiring.sequence_parallel:  # each rank keeps its shard
                total.copy_(self._rounded(total))
            if not wiring.own_streams:
                return total
            results = total.expand(len(self.group.local), *total.shape).clone()
            hops = gather(parts_LN.shape[1], self.group.ranks, unit)
            gathering = (site or NOWHERE)._replace(phase="gather")
            self._lose_(results.view(len(results), -1), hops, gathering, own_LN, in_gather=True)
            return results

        return Sum(finish, hops, missing)

    def all_gather(self, x: Tensor, site: Site | None = None, unit: int = 1) -> Tensor:
        """Gather `x` (...), of which each rank holds one chunk. Return each local rank's copy of it, (L, ...).

        If the gather is reliable, all copies are the same memory.
        """
        copies = self._rounded(x).expand(len(self.group.local), *x.shape)
        if self.wiring.reliable_gather:
            return copies
        copies = copies.clone(memory_format=torch.contiguous_format)
        copies_LN = copies.view(len(copies), -1)
        hops = self.wiring.algorithm.all_gather(copies_LN.shape[1], self.group.ranks, unit)
        gathering = (site or NOWHERE)._replace(operation="all_gather", phase="gather")
        self._lose_(copies_LN, hops, gathering, None, in_gather=True)
        return copies

    def adjoint_(self, gradients: Tensor, hops: Hops, missing: Missing) -> None:
        """Turn the gradient of a sum, repeated (L, ...), into those of its contributions, in place."""
        adjoint_(self._message(gradients.view(len(gradients), -1), hops, missing), self.wiring.repair)

    def memories_state(self) -> list:
        """Return what the repair remembers from training, as lists and tensors."""
        memories = self.memories.get(TRAINING, {})
        return [[site and tuple(site), list(memory.items())] for site, memory in memories.items()]

    def load_memories_state(self, state: list, device: torch.device) -> None:
        """Resume from `memories_state()`."""
        self.memories[TRAINING] = {
            site and Site(*site): {place: last.to(device) for place, last in memory} for site, memory in state
        }

    def _lose_(
        self, rows_LN: Tensor, hops: Hops, site: Site | None, own_LN: Tensor | None, *, in_gather: bool = False
    ) -> Missing:
        """Send the rows over `hops`, and leave in them what arrives."""
        network, repair = self.network, self.wiring.repair
        if self.wiring.control == "noise":
            _add_noise_(self._message(rows_LN, hops, NOTHING_MISSING), self.group.name, site)
            return NOTHING_MISSING
        itemsize, rows = self._itemsize(rows_LN), _on_wire(rows_LN) if network.carries_rows else None
        missing = network.send(hops, itemsize, repair=repair, group=self.group.name, site=site, rows=rows)
        memory = self._memory(site) if repair.remembers else None
        message = self._message(rows_LN, hops, missing)
        return settle_(message._replace(in_gather=in_gather, own_LN=own_LN, memory=memory), repair)

    def _message(self, rows_LN: Tensor, hops: Hops, missing: Missing) -> Message:
        capacity = self.network.wire.elements_per_packet(self._itemsize(rows_LN))
        positions = self.group.local if len(rows_LN) == len(self.group.local) else range(self.group.size)
        return Message(rows_LN, positions, self.group.ranks, hops, missing, self.network, capacity)

    def _chooses_by_partial_sums(self, hops: Hops) -> bool:
        """Return whether a sender must choose packets by a partial sum that spans several processes."""
        protects = stage_of(self.wiring.repair, "select") != ZERO
        return protects and self.group.processes > 1 and any(len(hop.positions) > 1 for hop in hops)

    def _itemsize(self, message: Tensor) -> int:
        return DTYPES[self.wiring.wire_dtype].itemsize if self.wiring.wire_dtype else message.element_size()

    def _rounded(self, message: Tensor) -> Tensor:
        """Round to what the wire's dtype can hold, and keep the message's own dtype."""
        return message.to(DTYPES[self.wiring.wire_dtype]).to(message.dtype) if self.wiring.wire_dtype else message

    def _memory(self, site: Site | None) -> Memory:
        """Return what last arrived of the messages of this site. Each block of evaluation has its own memory."""
        block = self.network.block
        for other in [kept for kept in self.memories if kept[0] == block[0] and kept != block]:
            del self.memories[other]
        memory: Memory = self.memories.setdefault(block, {}).setdefault(site, {})
        return memory


def _on_wire(rows_LN: Tensor) -> np.ndarray:
    """Return the rows' own memory, which a network that carries them changes."""
    if rows_LN.device.type != "cpu" or rows_LN.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"messages are {rows_LN.dtype} on {rows_LN.device}, but this network sends only float32 or float64 on the "
            "CPU: use a simulated network"
        )
    rows: np.ndarray = rows_LN.detach().numpy()
    return rows


def collective_of(model: nn.Module) -> LossyCollective | None:
    """Return the collective that all of the project's layers share; None if the model has no such layer."""
    found = (getattr(each, "collective", None) for each in model.modules())
    return next((each for each in found if isinstance(each, LossyCollective)), None)


class Sum(NamedTuple):
    """A sum that is being computed. The losses of its contributions are known already."""

    wait: Callable[[], Tensor]
    hops: Hops
    missing: Missing


NOTHING_MISSING = Missing([], reliable=True)


def all_reduce(x_RN: Tensor, network: LossyNetwork, **wiring: Any) -> Tensor:
    """Sum R stacked messages over a lossy network.

    Args:
        x_RN: (ranks, elements), one floating-point message per rank. It is not changed, and no gradient flows through.
        network: its links advance by the packets of the messages.
        wiring: settings of `Wiring.named`, such as `algorithm` and `repair`. `sequence_parallel` is refused, since it
            does not all-reduce; so is the repair "stale", which needs the earlier messages of a `LossyCollective`.

    Returns:
        (ranks, elements): the result that each rank holds.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if `x_RN` has another shape or dtype, a name is unknown, or the network can lose nothing of the sum.
    """
    check_is("x_RN", x_RN, Tensor, "stacked messages, such as torch.randn(4, 1000)")
    if x_RN.ndim != 2 or not x_RN.is_floating_point():
        raise ValueError(
            f"x_RN is {x_RN.dtype} of shape {tuple(x_RN.shape)}: stack floating-point messages to (ranks, elements)"
        )
    if wiring.get("sequence_parallel"):
        raise ValueError("sequence_parallel = True does not all-reduce: leave it out")
    collective = LossyCollective(network, RankGroup(len(x_RN)), Wiring.named(**wiring))
    check_reaches(network, collective.group, collective.wiring)
    if not any(network.scope.covers(NOWHERE._replace(phase=phase)) for phase in PHASES):
        raise ValueError(
            f"scope = {network.scope} leaves out a single sum, which belongs to no layer, module or direction: give "
            "only a phase, or no scope"
        )
    if collective.wiring.repair.remembers:
        raise ValueError(
            f"repair = '{collective.wiring.repair}' does not work for a single sum, before which nothing arrived: "
            "choose another"
        )
    result = collective.sum_(x_RN.detach().clone(memory_format=torch.contiguous_format))
    return result if collective.wiring.own_streams else result.expand_as(x_RN).clone()


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
