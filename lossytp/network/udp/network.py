"""Define a lossy network that really sends its packets."""

from typing import Any

import numpy as np

from lossytp.network.checks import shown
from lossytp.network.counters import Site
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.probe.trace_file import FlowTrace, ProbeTrace
from lossytp.network.repairs import ZERO, Repair
from lossytp.network.routes import Hops, Missing
from lossytp.network.udp.mesh import Cargo, Mesh

CARRIED = ("float32", "float64")


class UdpNetwork(LossyNetwork):
    """A network that sends the packets of `direct` all-reduces over UDP between processes, one rank each.

    The path between the machines causes a link's real losses. The link's loss process adds to them: the sender leaves
    out the packets that the process loses. Every rank learns over TCP which packets each rank lacks, so counters,
    reports and `trace()` are the same on all. A sum contains the values that arrived.

    The arguments are those of `LossyNetwork`. Call `connect` before the first message.
    """

    carries_rows = True

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        self._mesh: Mesh | None = None
        self._recorded: dict[tuple[int, int], list[np.ndarray]] = {}
        self._sent: dict[tuple[int, int], int] = {}

    def connect(self, mesh: Mesh) -> None:
        """Send through this mesh from now on. It is already connected to the other ranks."""
        self._mesh = mesh

    def _send(
        self, hops: Hops, itemsize: int, repair: Repair, group: str, site: Site | None, rows: np.ndarray | None
    ) -> Missing:
        """Send this rank's contribution, and receive the other ranks' contributions to its own chunk.

        Args:
            hops: hops of a reduce phase, each of which carries one rank's contribution to its receiver.
            itemsize: bytes per element.
            repair: must be "zero".
            group: name of the ranks' group.
            site: where in the model the message is from.
            rows: this rank's contribution, (1, elements). Afterwards the rank's own chunk holds the sum of what
                arrived, and the rest is zero: the sum of all ranks' rows is the result. With a single rank, the row
                does not change.
        """
        mesh = self._mesh
        if mesh is None:
            raise ValueError("this network has no sockets yet: call connect() first")
        self._check(hops, itemsize, repair, rows, mesh)
        assert rows is not None
        if not hops:
            return Missing([])
        row_N = rows[0]
        capacity = self.wire.elements_per_packet(itemsize)
        outgoing: list[Cargo] = []
        incoming: list[Cargo] = []
        for hop in hops:
            dropped = self._streams.take(group, hop.src, hop.dst, hop.num_packets(capacity))
            if mesh.rank not in (hop.src, hop.dst):
                continue
            sends, length = hop.src == mesh.rank, hop.stop - hop.start
            values = row_N[hop.start : hop.stop] if sends else np.zeros(length, row_N.dtype)
            other = hop.dst if sends else hop.src
            cargo = Cargo(other, values.view(np.uint8), capacity * itemsize, hop.start, capacity, dropped)
            (outgoing if sends else incoming).append(cargo)
        lost = mesh.exchange(outgoing, incoming)
        own = next(((hop.start, hop.stop) for hop in hops if hop.dst == mesh.rank), (0, 0))
        row_N[: own[0]] = 0
        row_N[own[1] :] = 0
        for cargo in incoming:
            row_N[own[0] : own[1]] += cargo.content.view(row_N.dtype)
        missing = Missing([lost[hop.src, hop.dst] for hop in hops])
        self._count(hops, missing, capacity, group, site)
        return missing

    def _check(self, hops: Hops, itemsize: int, repair: Repair, rows: np.ndarray | None, mesh: Mesh) -> None:
        one_each = all(hop.positions == (position,) for hop in hops for position in hop.positions)
        links = [(hop.src, hop.dst) for hop in hops]
        if rows is None or not one_each or len(set(links)) < len(links):
            raise ValueError("the UDP network carries only the all-reduces of algorithm 'direct': choose 'direct'")
        if repair != ZERO:
            raise ValueError(f"repair = '{repair}' does not work over the UDP network: choose 'zero'")
        if rows.dtype.name not in CARRIED or rows.dtype.itemsize != itemsize or len(rows) != 1:
            raise ValueError(
                f"{len(rows)} rows of {rows.dtype}, {itemsize} bytes per element on the wire, cannot be sent: the UDP "
                f"network carries one rank's {' or '.join(CARRIED)}; leave out wire_dtype, and start a process per rank"
            )
        absent = {rank for link in links for rank in link} - mesh.ranks
        if absent:
            raise ValueError(f"links {shown(links)} end at ranks that are not connected: connect {sorted(absent)} too")

    def _count(self, hops: Hops, missing: Missing, capacity: int, group: str, site: Site | None) -> None:
        for hop, packets in zip(hops, missing.packets, strict=True):
            count, link = hop.num_packets(capacity), (hop.src, hop.dst)
            self.counters.add((self._streams.purpose[0], site, group, *link), count, len(packets), 0, len(packets))
            if self._streams.of_training:
                before = self._sent.get(link, 0)
                self._recorded.setdefault(link, []).append(packets + before)
                self._sent[link] = before + count
        if hops:
            self.counters.add_message((self._streams.purpose[0], site, group), missing.any)

    def trace(self) -> ProbeTrace:
        """Return the fates of training's packets on each link, in the order of sending.

        Flows are numbered in the order of the links. `Replay` loses the same packets in a simulated network.
        """
        flows = {}
        for number, (link, sent) in enumerate(sorted(self._sent.items())):
            lost = np.zeros(sent, np.bool_)
            lost[np.concatenate(self._recorded[link])] = True
            flows[number] = FlowTrace(
                lost=lost, src=str(link[0]), dst=str(link[1]), packet_bytes=self.wire.mtu_bytes, rate_packets_per_s=None
            )
        return ProbeTrace(flows=flows, source="training over UDP")

    def state_dict(self) -> dict:
        recorded = [[*link, sent, np.concatenate(self._recorded[link]).tolist()] for link, sent in self._sent.items()]
        return super().state_dict() | {"recorded": recorded}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        recorded = state.get("recorded", [])
        self._sent = {(src, dst): sent for src, dst, sent, _ in recorded}
        self._recorded = {(src, dst): [np.array(lost, np.int64)] for src, dst, _, lost in recorded}
