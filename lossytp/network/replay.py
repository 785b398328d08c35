"""Replay the recorded losses of named links."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lossytp.network.checks import check_filled
from lossytp.network.links import Link, checked_link
from lossytp.network.probe.trace_file import read_trace
from lossytp.network.streams import Key
from lossytp.network.trace import Trace, TraceLosses


@dataclass(frozen=True)
class Replay:
    """A loss process that loses on each link the packets that a recording lost there.

    A run over `transport = "udp"` makes such a recording. Training starts at the recording's first packet, and wraps
    after its last. Each evaluation starts at its own offset, as with `Trace`. The closed forms describe all links
    together.

    Args:
        links: pairs of a link and its losses, one for every link that carries packets.

    Raises:
        ValueError: if there are no links, or one is there twice.
    """

    links: tuple[tuple[Link, Trace], ...]

    def __post_init__(self) -> None:
        check_filled("links", self.links)
        times = Counter(checked_link(link) for link, _ in self.links)
        (src, dst), most = times.most_common(1)[0]
        if most > 1:
            raise ValueError(f"the recording has {most} flows from {src} to {dst}: give one for each link")

    @classmethod
    def from_file(cls, path: str | Path) -> "Replay":
        """Return the recording in a file of `lossytp.network.probe.trace_file` that names its flows by ranks.

        Raises:
            ValueError: if the file cannot be read, or its flows are not links between ranks.
        """
        flows = read_trace(Path(path)).flows.values()
        try:
            links = tuple(((int(flow.src), int(flow.dst)), flow.losses()) for flow in flows)
        except ValueError as error:
            raise ValueError(
                f"trace {path} does not name its flows by ranks ({error}): give the trace of a run with "
                "transport = 'udp', or use trace(FILE)"
            ) from error
        return cls(links)

    @property
    def loss_rate(self) -> float:
        """Return the share of all links' packets that were lost."""
        return sum(len(trace.lost) for _, trace in self.links) / self._packets

    @property
    def mean_burst_packets(self) -> float:
        """Return the mean run of consecutive losses over all links; infinite if all packets were lost."""
        lost = sum(len(trace.lost) for _, trace in self.links)
        bursts = lost - sum(trace.both_lost(1) for _, trace in self.links)
        return lost / bursts if bursts else math.inf if lost else 0.0

    def autocorrelation(self, lag: int) -> float:
        """Return the correlation between the losses of a link's packets that are `lag` apart; 0 if they never vary."""
        rate = self.loss_rate
        if lag == 0 or rate in (0, 1):
            return float(lag == 0)
        both = sum(trace.both_lost(lag) for _, trace in self.links) / self._packets
        return (both - rate**2) / (rate * (1 - rate))

    @property
    def _packets(self) -> int:
        return sum(trace.num_packets for _, trace in self.links)

    def losses(self, key: Key) -> TraceLosses:
        """Return the losses of the link that ends `key`.

        Raises:
            ValueError: if the recording lacks the link.
        """
        link: Any = (key[-2], key[-1])
        return TraceLosses(self.of(link), key, offset=0 if "training" in key[:-3] else None)

    def of(self, link: Link) -> Trace:
        """Return what the recording holds of a link.

        Raises:
            ValueError: if it lacks the link.
        """
        self.check_has([link])
        return dict(self.links)[link]

    def check_has(self, links: Iterable[Link]) -> None:
        """Raise ValueError if the recording lacks one of the links."""
        recorded = dict(self.links)
        for src, dst in sorted(links):
            if (src, dst) not in recorded:
                known = ", ".join(f"{src}>{dst}" for src, dst in recorded)
                raise ValueError(
                    f"the recording has no link {src}>{dst}, only {known}: give a recording with as many ranks"
                )
