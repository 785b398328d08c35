"""A network whose directed links lose packets."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import index
from typing import TYPE_CHECKING

import numpy as np

from lossytp.network.bernoulli import NO_PACKETS, Bernoulli
from lossytp.network.counters import Counters, Site
from lossytp.network.packets import Wire
from lossytp.network.process import LinkLosses, LossProcess
from lossytp.network.routes import Hop, LostSpans
from lossytp.network.tape import LossTape

if TYPE_CHECKING:
    import pandas

Link = tuple[int, int]  # src, dst: global ranks, or SWITCH
LOSSLESS = Bernoulli(loss_rate=0.0)
TRAINING: tuple[str, int] = ("training", 0)


class LossyNetwork:
    """Links that lose packets, each by a loss process of its own, reproducibly.

    Args:
        process: the process of every link, or `{(src, dst): process}` for named links.
        default: the process of links that `process` does not name; lossless when left out.
        seed: names the random streams; the same seed loses the same packets in any process layout.
        wire: packet geometry.

    A link's state advances once a packet and carries over from message to message; it starts stationary.
    """

    def __init__(
        self,
        process: LossProcess | Mapping[Link, LossProcess],
        *,
        default: LossProcess = LOSSLESS,
        seed: int = 0,
        wire: Wire | None = None,
    ) -> None:
        self._named: Mapping[Link, LossProcess] = process if isinstance(process, Mapping) else {}
        self._default = default if isinstance(process, Mapping) else process
        for given in (self._default, *self._named.values()):
            if isinstance(given, type) or not isinstance(given, LossProcess):
                raise ValueError(f"{given!r} is no loss process: give one, such as Bernoulli(loss_rate=0.01)")
        self.seed = index(seed)  # numpy's integers would name other streams
        self.wire = wire or Wire()
        self.counters = Counters()
        self._tape: LossTape | None = None
        self._suspended = False
        self._purpose = TRAINING
        self._links: dict[tuple[str, int, int], LinkLosses] = {}

    def process(self, src: int, dst: int) -> LossProcess:
        """The loss process of the link src -> dst."""
        return self._named.get((src, dst), self._default)

    def lost_packets(
        self, src: int, dst: int, num_packets: int, *, group: str = "tp", site: Site | None = None
    ) -> np.ndarray:
        """Sorted indices lost among the link's next `num_packets` packets, int64 (num_lost,); advances the link.

        Taking n packets at once or in any pieces gives the same losses. Each `group` of ranks has streams of its
        own on a link, so that its ranks need not know what other groups send. `site` says where to count them.
        """
        src, dst, num_packets = index(src), index(dst), index(num_packets)
        if num_packets < 0:
            raise ValueError(f"num_packets = {num_packets} is negative: give 0 or more")
        if self._suspended:
            return NO_PACKETS
        link = self._links.get((group, src, dst))
        if link is None:
            key = (self.seed, *self._purpose, group, src, dst)
            link = self._links[group, src, dst] = self.process(src, dst).losses(key)
        lost = link.take(num_packets)
        self.counters.add((self._purpose[0], site, group, src, dst), num_packets, len(lost))
        return lost

    def lost_spans(
        self, hops: tuple[Hop, ...], itemsize: int, *, group: str = "tp", site: Site | None = None
    ) -> LostSpans:
        """Send one message of `itemsize`-byte elements over `hops`; say who lacks which of its elements.

        Within `reliable()` nothing is lost and no link advances. While a tape replays, its losses come again.
        """
        if self._tape is not None and self._tape.replaying:
            return self._tape.next()
        spans = LostSpans([], [], [], reliable=self._suspended)
        elements = self.wire.elements_per_packet(itemsize)
        for hop in () if self._suspended else hops:
            num_packets = self.wire.num_packets(hop.stop - hop.start, itemsize)
            for packet in self.lost_packets(hop.src, hop.dst, num_packets, group=group, site=site).tolist():
                start = hop.start + packet * elements
                for position in hop.positions:
                    spans.rows.append(position)
                    spans.starts.append(start)
                    spans.stops.append(min(start + elements, hop.stop))
        if hops and not self._suspended:
            self.counters.add_message((self._purpose[0], site, group), bool(spans.rows))
        if self._tape is not None:
            self._tape.record(spans)
        return spans

    @property
    def suspended(self) -> bool:
        """Whether the network is reliable for now."""
        return self._suspended

    @contextmanager
    def reliable(self) -> Iterator[None]:
        """Within the block nothing is lost, no link advances and nothing is counted."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    @contextmanager
    def evaluation(self, step: int) -> Iterator[None]:
        """Within the block losses come from streams of their own, named by `step`: training's are not shifted."""
        before = self._purpose, self._links
        self._purpose, self._links = ("evaluation", index(step)), {}
        try:
            yield
        finally:
            self._purpose, self._links = before

    @contextmanager
    def recording(self, tape: LossTape) -> Iterator[None]:
        """Within the block `tape` records the losses of each collective, or replays them if it has run before."""
        before, self._tape = self._tape, tape
        try:
            yield
        finally:
            self._tape = before
            tape.rewind()

    def report(self) -> "pandas.DataFrame":
        """Packets, losses and observed rate by purpose, layer, module, direction, operation and link."""
        import pandas  # slow to import, and only a report needs it

        columns = ["purpose", *Site._fields, "group", "src", "dst", "packets", "lost"]
        table = pandas.DataFrame(self.counters.rows(), columns=columns)
        table["observed_loss_rate"] = table["lost"] / table["packets"]
        return table

    def state_dict(self) -> dict:
        """Every training link's state and all counters, as JSON-ready values; refused within `evaluation()`."""
        if self._purpose != TRAINING:
            raise ValueError("state_dict() within evaluation(): call it after the block, where training's links are")
        links = [[list(link), losses.state_dict()] for link, losses in self._links.items()]
        return {"seed": self.seed, "links": links, "counters": self.counters.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Resume from `state_dict()`; ValueError when it is of another seed, and within `evaluation()`."""
        if self._purpose != TRAINING:
            raise ValueError("load_state_dict() within evaluation(): call it after the block")
        if state["seed"] != self.seed:
            raise ValueError(f"the state is of seed {state['seed']}, this network of {self.seed}: give the same seed")
        self._links = {}
        for (group, src, dst), link_state in state["links"]:
            losses = self.process(src, dst).losses((self.seed, *TRAINING, group, src, dst))
            losses.load_state_dict(link_state)
            self._links[group, src, dst] = losses
        self.counters.load_state_dict(state["counters"])
