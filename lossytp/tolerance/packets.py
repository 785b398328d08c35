"""Find the critical packets of a language model: those that it cannot lose.

A few activations of some pretrained models are thousands of times larger than the others, mostly at the first token
(Sun et al., "Massive activations in large language models", COLM 2024, arXiv:2402.17762). The packets that carry them
have a large norm. Norm is not damage, so each packet that stands out is lost, and the rise of cross-entropy measured.

In every sequence, the packet that stands out most is lost alone; then all others that stand out are lost together. If
these cost more than `CRITICAL_NATS`, the next of them is lost alone, and so on. Sequences are tested side by side.

Shapes: N sequences, B of them in one message, T tokens of each; R ranks, M elements of a message.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from torch.nn.functional import pad

from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.repairs import Repair, Zero
from lossytp.network.routes import Hops, Missing, Routes
from lossytp.network.scope import Site
from lossytp.parallel.collectives import Message, fills, zero_

CRITICAL_NATS = 1.0  # a token, over the sequence: a packet whose loss alone costs more is critical
STANDS_OUT = 10.0  # times the median norm of the packets of the same sum
MOST, PEELED = 16, 3  # packets of a sequence that are tested, and those of them that are lost alone

Place = tuple[int | None, str | None]  # layer and module


class Packet(NamedTuple):
    """A packet that stands out.

    Attributes:
        message, sequence, token: where its largest element is: the message of the text, the sequence of the message.
        src, dst: its link.
        hop, number: the hop of the message, and the packet of the hop.
        norm: its L2 norm.
        ratio: the norm, over the median of all packets of the same sum.
    """

    layer: int | None
    module: str | None
    message: int
    sequence: int
    token: int
    src: int
    dst: int
    hop: int
    number: int
    norm: float
    ratio: float


@dataclass(frozen=True)
class Watch(Zero):
    """Show each message, before it loses anything, to the network's `see`."""

    name = "watch"


@fills(Watch)
def watch_(message: Message, repair: Repair) -> None:
    """Show the message, and then set what is missing to zero."""
    network: Any = message.network
    if network.see is not None:
        network.see(message, network.site)
    zero_(message, repair)


class SelectiveNetwork(LossyNetwork):
    """A network that treats chosen packets of the reduce phase apart. Set the attributes before a message is sent.

    Attributes:
        chosen: packets of each hop, by layer and module.
        alone: whether the chosen packets are lost, and no others.
        delivers: whether `protect_first` sends the chosen packets until they arrive, and not those of first positions.
        see: shown each message of the repair `Watch`, and its site.
    """

    chosen: Mapping[Place, dict[int, list[int]]] = MappingProxyType({})
    alone = delivers = False
    see: Callable[[Message, Site], None] | None = None
    site: Site | None = None

    def _send_all(self, hops: Hops, capacity: int, repair: Repair, group: str, site: Site | None) -> Missing:
        self.site = site
        return Missing(self._of(hops)) if self.alone else super()._send_all(hops, capacity, repair, group, site)

    def _packets_at(self, positions: tuple[int, int] | slice, hops: Hops, capacity: int) -> list[np.ndarray]:
        return self._of(hops) if self.delivers else super()._packets_at(positions, hops, capacity)

    def _of(self, hops: Hops) -> list[np.ndarray]:
        site = self.site
        found = self.chosen.get((site.layer, site.module), {}) if site and site.phase == "reduce" else {}
        return [np.array(sorted(found.get(number, ())), dtype=np.int64) for number in range(len(hops))]


def standing_out(
    message: Message, site: Site, routes: Routes, *, number: int, shape: tuple[int, int], times: float = STANDS_OUT
) -> list[Packet]:
    """Return the packets that stand out of those of their sum, if B sequences share a message.

    Args:
        message: what the ranks contribute to the sum.
        site: the sum's place in the model.
        routes: the hops of a message of some size.
        number: of the message, among those of the text.
        shape: (B, T).
        times: the median norm of the sum's packets; a packet with more stands out.
    """
    rows_RM, capacity, (sequences, tokens) = message.rows_LN, message.capacity, shape
    width = rows_RM.shape[1] // (sequences * tokens)
    hops, found = routes(rows_RM.shape[1], tuple(message.ranks), 1), []
    sums = [rows_RM[list(hop.positions), hop.start : hop.stop].sum(0) for hop in hops]
    packets = [pad(each.float(), (0, -len(each) % capacity)).view(-1, capacity) for each in sums]
    norms = [each.norm(dim=1).cpu().numpy() for each in packets]
    median = float(np.median(np.concatenate(norms)))
    for index, (hop, carried, norms_P) in enumerate(zip(hops, sums, norms, strict=True)):
        for packet in np.flatnonzero(norms_P > times * median).tolist():
            start, norm = packet * capacity, float(norms_P[packet])
            largest = hop.start + start + int(carried[start : start + capacity].abs().argmax())
            sequence, token = divmod(largest // width, tokens)
            link = (hop.src, hop.dst, index, packet, norm, norm / median)
            found.append(Packet(site.layer, site.module, number, sequence, token, *link))
    return found


Lose = Callable[[Sequence[Packet]], dict[tuple[int, int], float]]
"""Return the rise of each sequence that loses exactly these packets, by message and sequence."""


class Found(NamedTuple):
    """What the search found.

    Attributes:
        critical: each critical packet, with the rise of its sequence if it alone is lost.
        others: the rise of each sequence that lost all its other packets that stand out.
        unexplained: the number of sequences that these others still harm by more than `CRITICAL_NATS`.
    """

    critical: list[tuple[Packet, float]]
    others: list[float]
    unexplained: int


def search(packets: Sequence[Packet], lose: Lose) -> Found:
    """Find the critical packets among those that stand out."""
    left: dict[tuple[int, int], list[Packet]] = {}
    for packet in sorted(packets, key=lambda packet: -packet.ratio):
        ours = left.setdefault((packet.message, packet.sequence), [])
        if len(ours) < MOST:
            ours.append(packet)
    critical, others = [], {}
    for _ in range(PEELED):
        if not left:
            break
        alone = lose([each[0] for each in left.values()])
        rest = lose([packet for each in left.values() for packet in each[1:]])
        for place, (packet, *_) in left.items():
            if alone[place] > CRITICAL_NATS:
                critical.append((packet, alone[place]))
            if place in rest:
                others[place] = rest[place]
        left = {place: each[1:] for place, each in left.items() if rest.get(place, 0) > CRITICAL_NATS}
    return Found(critical, list(others.values()), len(left))


def chosen_in(packets: Sequence[Packet], message: int) -> dict[Place, dict[int, list[int]]]:
    """Return the packets of one message as `SelectiveNetwork` takes them."""
    found: dict[Place, dict[int, list[int]]] = {}
    for packet in packets:
        if packet.message == message:
            found.setdefault((packet.layer, packet.module), {}).setdefault(packet.hop, []).append(packet.number)
    return found
