"""A network whose directed links lose packets.

A message is a tensor in row-major order. `direct` and `ring` cut it into as many chunks as ranks, of ceil(n / R)
elements; other algorithms send it whole (`lossytp.network.routes`). A link carries packets of whole elements
(`lossytp.network.packets`). A lost packet of a contribution is missing from the sum. A lost packet of a result is
missing on the ranks that it was sent to. All contributions are summed before any result is sent. The repair decides
what replaces missing elements (`lossytp.network.repairs`). Without a repair they are zero.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from lossytp.network.bernoulli import NO_PACKETS
from lossytp.network.checks import check_at_least, check_is, check_number, shown
from lossytp.network.counters import COUNTED, Counters, Site
from lossytp.network.identity import described
from lossytp.network.link_processes import LinkProcesses
from lossytp.network.link_streams import LinkStreams
from lossytp.network.links import Link
from lossytp.network.loss_process import LossProcess
from lossytp.network.packets import Wire
from lossytp.network.repairs import ZERO, Repair
from lossytp.network.routes import Hop, Hops, Missing
from lossytp.network.scope import EVERYWHERE, Scope
from lossytp.network.tape import LossTape

if TYPE_CHECKING:
    import pandas

SUSPENDING = threading.Lock()  # of all networks, since a network with a lock of its own could not be copied


class LossyNetwork:
    """Lose packets on directed links, reproducibly. Each link has its own loss process.

    A link's state starts stationary. It advances once per packet and carries over from message to message.

    A deep copy of the network, or of a model that uses it, has its own link states and counters. From then on, original
    and copy each lose and report their own packets. A copy that is made within `reliable()`, `evaluation()` or
    `recording()` is outside of these blocks.

    Args:
        process: the process of every link, or `{(src, dst): process}` for named links.
        default: the process of links that a mapping does not name. If left out, they are lossless.
        seed: selects the random streams. The same seed loses the same packets in any process layout.
        wire: packet geometry.
        scope: which messages may lose packets; all if left out.

    Raises:
        TypeError: if an argument is of another type, or a link is not a pair of ranks.
        ValueError: if a process is not a loss process, a mapping is empty and has no `default`, or `default` has no
            mapping.
    """

    carries_rows = False
    """Whether `send` needs the values of a message, because it really sends them."""

    def __init__(
        self,
        process: LossProcess | Mapping[Link, LossProcess],
        *,
        default: LossProcess | None = None,
        seed: int = 0,
        wire: Wire | None = None,
        scope: Scope = EVERYWHERE,
    ) -> None:
        processes = LinkProcesses(process, default)
        check_number("seed", seed, Integral, "one, such as 0")
        self.seed = index(seed)  # numpy's integers would select other streams
        self._streams = LinkStreams(processes, self.seed)
        self.wire = Wire() if wire is None else wire
        check_is("wire", self.wire, Wire, "one, such as Wire(mtu_bytes=1500)")
        check_is("scope", scope, Scope, 'one, such as Scope(direction="forward")')
        self.scope = scope
        self.counters = Counters()
        self._tape: LossTape | None = None
        self._suspended = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy holds. It is outside of all blocks, because nothing would end them in the copy."""
        return self.__dict__ | {"_suspended": 0, "_tape": None}

    def process(self, src: int, dst: int) -> LossProcess:
        """Return the loss process of the link src -> dst."""
        return self._streams.processes.of(src, dst)

    def loss_rate(self, src: int, dst: int) -> float:
        """Return the loss rate of the link src -> dst."""
        return self._streams.processes.loss_rate(src, dst)

    @property
    def named_links(self) -> tuple[Link, ...]:
        """Return the links that the mapping names."""
        return tuple(self._streams.processes.named)

    def lost_packets(
        self, src: int, dst: int, num_packets: int, *, group: str = "tp", site: Site | None = None
    ) -> np.ndarray:
        """Return which of the link's next `num_packets` packets are lost, and advance the link.

        Taking n packets at once or in pieces gives the same losses.

        Args:
            src: rank at the link's start.
            dst: rank at its end.
            num_packets: number of packets to send.
            group: name of the group of ranks. Each group has its own streams on a link, so its ranks need not know what
                other groups send.
            site: where in the model the packets are counted.

        Returns:
            Sorted indices, int64 (num_lost,).
        """
        src, dst, num_packets = index(src), index(dst), index(num_packets)
        check_at_least("num_packets", num_packets, 0)
        if self._is_reliable(site):
            return NO_PACKETS
        lost = self._streams.take(group, src, dst, num_packets)
        self.counters.add((self._streams.purpose[0], site, group, src, dst), num_packets, len(lost), 0, len(lost))
        return lost

    def send(
        self,
        hops: Hops,
        itemsize: int,
        *,
        repair: Repair = ZERO,
        group: str = "tp",
        site: Site | None = None,
        rows: np.ndarray | None = None,
    ) -> Missing:
        """Send one message of `itemsize`-byte elements over `hops`; return the packets that each hop lacks.

        A network that `carries_rows` sends this process's `rows`, and overwrites them with what arrived. Others need
        none.

        Within `reliable()`, and outside the network's scope, no link advances and nothing is counted. While a tape
        replays, the recorded losses are returned.
        """
        if self._tape is not None and self._tape.replaying:
            missing: Missing = self._tape.next()
            return missing
        reliable = self._is_reliable(site)
        missing = Missing([], reliable=True) if reliable else self._send(hops, itemsize, repair, group, site, rows)
        if self._tape is not None:
            self._tape.record(missing)
        return missing

    def _send(
        self, hops: Hops, itemsize: int, repair: Repair, group: str, site: Site | None, rows: np.ndarray | None
    ) -> Missing:
        capacity = self.wire.elements_per_packet(itemsize)
        missing = [self._send_over(hop, capacity, repair, group, site) for hop in hops]
        if hops:
            self.counters.add_message((self._streams.purpose[0], site, group), any(len(packets) for packets in missing))
        return Missing(missing)

    def _send_over(self, hop: Hop, capacity: int, repair: Repair, group: str, site: Site | None) -> np.ndarray:
        counts = [0, 0, 0]  # packets, lost, extra

        def send(count: int, extra: int = 0) -> np.ndarray:
            lost = self._streams.take(group, hop.src, hop.dst, count)
            counts[0] += count
            counts[1] += len(lost)
            counts[2] += extra
            return lost

        own, elements = hop.stop - hop.start, repair.elements_on_wire(hop.stop - hop.start, capacity)
        missing = repair.carry(own, capacity, send)
        packets, lost, extra = counts
        extra += -(-elements // capacity) - -(-own // capacity)  # the padding of a repair's blocks
        self.counters.add((self._streams.purpose[0], site, group, hop.src, hop.dst), packets, lost, extra, len(missing))
        return missing

    def normals(self, hops: Hops, *, group: str = "tp", site: Site | None = None) -> list[np.ndarray]:
        """Return standard normal numbers for the elements of each hop, each from its link's stream.

        Nothing is counted. The list is empty where the network is reliable. While a tape replays, the recorded numbers
        are returned.
        """
        if self._tape is not None and self._tape.replaying:
            recorded: list[np.ndarray] = self._tape.next()
            return recorded
        used = () if self._is_reliable(site) else hops
        numbers = [self._streams.normals(group, hop) for hop in used]
        if self._tape is not None:
            self._tape.record(numbers)
        return numbers

    def _is_reliable(self, site: Site | None) -> bool:
        return self.suspended or not self.scope.covers(site)

    @property
    def tape(self) -> LossTape | None:
        """Return the tape that records or replays within `recording()`."""
        return self._tape

    @property
    def block(self) -> tuple[str, int]:
        """Return ("training", 0), or ("evaluation", n) within the n-th block of `evaluation`, whatever its step."""
        return self._streams.block

    @property
    def suspended(self) -> bool:
        """Return whether the program is within `reliable()`."""
        return self._suspended > 0

    @contextmanager
    def reliable(self) -> Iterator[None]:
        """Lose nothing within the block: no link advances and nothing is counted.

        The block affects the whole network, so also messages that other threads send meanwhile.
        """
        self._suspend(1)
        try:
            yield
        finally:
            self._suspend(-1)

    def _suspend(self, change: int) -> None:
        """Count the blocks of `reliable()` that are under way: those of several threads may overlap."""
        with SUSPENDING:
            self._suspended += change

    def evaluation(self, step: int) -> AbstractContextManager[None]:
        """Draw losses within the block from streams named by `step`, so that training's streams do not shift."""
        return self._streams.evaluation(step)

    @contextmanager
    def recording(self, tape: LossTape) -> Iterator[None]:
        """Let `tape` record the losses of each collective within the block, or replay them if it has run before."""
        before, self._tape = self._tape, tape
        try:
            yield
        finally:
            self._tape = before
            tape.rewind()

    def report(self) -> "pandas.DataFrame":
        """Return packets, losses and observed rate by purpose, layer, module, direction, operation and link."""
        import pandas  # slow to import, and only a report needs it

        columns = ["purpose", *Site._fields, "group", "src", "dst", *COUNTED]
        table = pandas.DataFrame(self.counters.rows(), columns=columns)
        table["observed_loss_rate"] = table["lost"] / table["packets"]
        return table

    def summary(self, purpose: str) -> dict:
        """Return the totals of "training" or "evaluation", whole and grouped.

        Where this process's training links replay traces, `wraps` is the largest number of times that a link's trace
        has begun again.
        """
        summary = self.counters.summary(purpose)
        if purpose == "training" and self._streams.of_training and self._streams.wraps is not None:
            summary["wraps"] = self._streams.wraps
        return summary

    def state_dict(self) -> dict:
        """Return the state of every training link, all counters and the network's settings, as JSON-ready values.

        Raises:
            ValueError: within `evaluation()`.
        """
        if not self._streams.of_training:
            raise ValueError("state_dict() within evaluation(): call it after the block")
        return {
            "seed": self.seed,
            "settings": self._settings(),
            **self._streams.state_dict(),
            "counters": self.counters.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Resume from `state_dict()`. A state that is refused changes nothing.

        Of the settings, a state from an older version holds only the seed.

        Raises:
            TypeError: if `state` is not a dict.
            ValueError: if the state is of a network with another seed, process, wire or scope, if `state` is not what
                `state_dict()` returns, or within `evaluation()`.
        """
        if not self._streams.of_training:
            raise ValueError("load_state_dict() within evaluation(): call it after the block")
        check_is("state", state, dict, "what state_dict() returned")
        lacking = [name for name in ("seed", "links", "normals", "counters") if name not in state]
        if lacking:
            raise ValueError(f"state = {shown(state)} lacks {', '.join(lacking)}: give what state_dict() returned")
        if state["seed"] != self.seed:
            raise ValueError(f"the state is of seed {state['seed']}, this network of {self.seed}: give the same seed")
        self._check_settings(state.get("settings", self._settings()))
        try:
            streams, counters = self._streams.loaded(state), Counters()
            counters.load_state_dict(state["counters"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(
                f"state = {shown(state)} cannot be loaded ({reason}): give what state_dict() returned"
            ) from error
        self._streams, self.counters = streams, counters

    def _settings(self) -> dict[str, str]:
        """Return the settings that must be equal for a resumed network to lose the same packets."""
        return self._streams.processes.described() | {"wire": described(self.wire), "scope": described(self.scope)}

    def _check_settings(self, theirs: dict[str, str]) -> None:
        check_is("settings of the state", theirs, dict, "what state_dict() returned")
        mine = self._settings()
        for name in [*mine, *theirs]:
            one, other = (settings.get(name, settings.get("process")) for settings in (theirs, mine))
            if one != other:
                raise ValueError(
                    f"the state is of a network with {name} = {one}, this one has {other}: give the same {name}"
                )
