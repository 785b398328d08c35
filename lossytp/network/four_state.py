"""The four-state Markov chain of Linux ``tc netem loss state``: bursts with gaps in them, and single losses.

Salsano, Ludovici, Ordine and Giuliano, "Definition of a general and intuitive loss model for packet networks and its
implementation in the Netem module in the Linux kernel", 2012. The states: 1 delivered between bursts, 2 delivered
within a burst, 3 lost within a burst, 4 a single loss between bursts. State 1 always follows state 4.

As in the kernel's ``net/sched/sch_netem.c`` the chain steps first, and the new state decides the loss;
`GilbertElliott` decides by the state before its step. From a stationary start the losses have the same law either way.
The kernel starts in state 1; a link here starts stationary.
"""

import math
from dataclasses import dataclass

import numpy as np

from lossytp.network.bernoulli import NO_PACKETS, block_size, geometric
from lossytp.network.checks import check_probability
from lossytp.network.streams import Key, Stream

IS_LOST = np.array([0.0, 0.0, 1.0, 1.0])
WITHIN_BURST, LOST_IN_BURST, LOST_ALONE = 1, 2, 3  # states 2, 3 and 4, counted from 0
ROUNDING = 1e-9  # of `to_netem`, which writes ten digits


@dataclass(frozen=True)
class FourState:
    """`p13` is the probability of stepping from state 1 to state 3, and so on; positions as in netem's notation.

    With `p32` = `p14` = 0 it is the simple Gilbert channel. If `p13` or `p31` is 0, the chain may leave some states
    forever. Its stationary law is then the one that it reaches from state 1, where the kernel starts.
    """

    p13: float
    p31: float
    p32: float = 0.0
    p23: float = 1.0
    p14: float = 0.0

    def __post_init__(self) -> None:
        for name in ("p13", "p31", "p32", "p23", "p14"):
            check_probability(name, getattr(self, name))
        for one, other in (("p13", "p14"), ("p31", "p32")):
            total = getattr(self, one) + getattr(self, other)
            if total > 1 + ROUNDING:
                raise ValueError(f"{one} + {other} = {total:.10g} is above 1: give two that add up to 1 or less")

    @property
    def leave_gap(self) -> float:
        """Return the probability of leaving state 1."""
        return min(1.0, self.p13 + self.p14)

    @property
    def leave_losses(self) -> float:
        """Return the probability of leaving state 3."""
        return min(1.0, self.p31 + self.p32)

    @property
    def shares(self) -> np.ndarray:
        """Return the stationary probabilities of states 1 to 4, (4,), from the balance equations of Salsano et al."""
        back = self.p31 if self.p13 else 1.0  # states that cannot be reached have weight 0
        again = self.p23 if self.p13 and self.p32 else 1.0
        weights = np.array([back * again, self.p13 * self.p32, self.p13 * again, self.p14 * back * again])
        return weights / weights.sum()

    @property
    def loss_rate(self) -> float:
        """Return the stationary probability that a packet is lost: the share of states 3 and 4."""
        return float(self.shares @ IS_LOST)

    @property
    def bursts_per_packet(self) -> float:
        """Return the runs of consecutive losses per packet: a run is a sojourn in state 3, or one packet in state 4."""
        return float(self.shares[LOST_ALONE] + self.shares[LOST_IN_BURST] * self.leave_losses)

    @property
    def mean_burst_packets(self) -> float:
        """Return the mean run of consecutive losses; 0 without losses, infinite if all packets are lost."""
        if self.bursts_per_packet == 0:
            return math.inf if self.loss_rate else 0.0
        return self.loss_rate / self.bursts_per_packet

    @property
    def transition(self) -> np.ndarray:
        """Return the probabilities of going from one state (row) to another (column), (4, 4)."""
        return np.array(
            [
                [1 - self.leave_gap, 0, self.p13, self.p14],
                [0, 1 - self.p23, self.p23, 0],
                [self.p31, self.p32, 1 - self.leave_losses, 0],
                [1, 0, 0, 0],
            ]
        )

    def autocorrelation(self, lag: int) -> float:
        """Return the correlation of the losses of two packets `lag` apart; 0 for a process that never varies."""
        rate = self.loss_rate
        if lag == 0 or rate in (0, 1):
            return float(lag == 0)
        both_lost = (self.shares * IS_LOST) @ np.linalg.matrix_power(self.transition, abs(lag)) @ IS_LOST
        return float(both_lost - rate**2) / (rate * (1 - rate))

    def to_netem(self) -> str:
        """Return the process in the notation of Linux ``tc netem``: ``state p13 p31 p32 p23 p14``."""
        values = (self.p13, self.p31, self.p32, self.p23, self.p14)
        return "loss state " + " ".join(f"{100 * value:.10g}%" for value in values)

    def losses(self, key: Key) -> "FourStateLosses":
        """Return the losses of one link, drawn from the streams below `key`."""
        return FourStateLosses(self, key)


class FourStateLosses:
    """Find a link's lost packets by drawing one cycle after the other: a pause, then a run of losses.

    Cycle j takes numbers 4j to 4j + 3 of one stream. They decide whether a pause in state 1 ends in a single loss,
    whether a pause in state 2 follows a run in state 3, and how long the pause and the run are. So a cycle can be drawn
    again from its number, its first packet and the state of its pause.
    """

    def __init__(self, process: FourState, key: Key) -> None:
        self._process = process
        self._cycles_per_packet = process.bursts_per_packet
        self._numbers = Stream((*key, "cycles"))
        bounds = np.cumsum(process.shares)
        start = Stream((*key, "initial")).uniforms(1)[0] * bounds[-1]
        self._first_state = int(bounds.searchsorted(start, side="right"))
        self._restart(
            packets=0, cycle=0, cycle_start=0, within_burst=self._first_state in (WITHIN_BURST, LOST_IN_BURST)
        )

    def _restart(self, *, packets: int, cycle: int, cycle_start: int, within_burst: bool) -> None:
        self._packets = packets  # taken so far
        self._cycle = self._drawn = cycle  # number of the one that the next packet falls in; cycles drawn
        self._cycle_start = self._drawn_to = cycle_start
        self._next_within = within_burst  # whether the next cycle drawn has its pause in state 2
        self._cursor = 0  # cycles in `_runs` that are over
        self._runs = np.empty((3, 0), dtype=np.int64)  # a run's first packet, the one after it, whether in state 2
        self._numbers.seek(4 * cycle)
        if self._cycles_per_packet:  # otherwise the chain stays where its losses never vary
            self._draw_past(packets)

    def _draw_past(self, packet: int) -> None:
        """Extend `_runs` until the last one ends after `packet`."""
        blocks = [self._runs[:, self._cursor :]]
        while self._drawn_to <= packet:
            blocks.append(self._draw(block_size((packet - self._drawn_to) * self._cycles_per_packet)))
        self._runs = np.concatenate(blocks, axis=1)
        self._cursor = 0

    def _draw(self, count: int) -> np.ndarray:
        """Return the next `count` cycles' runs of losses, int64 (3, count)."""
        process = self._process
        leave_gap, leave_losses, leave_pause = process.leave_gap or 1, process.leave_losses or 1, process.p23 or 1
        numbers = self._numbers.uniforms(4 * count).reshape(count, 4)  # a state without a way out has no way in
        alone = numbers[:, 0] < process.p14 / leave_gap
        goes_on = numbers[:, 1] >= process.p31 / leave_losses
        if self._drawn == 0 and self._first_state == LOST_ALONE:
            alone[0] = True

        # The next pause is in state 2 if this cycle's run is in state 3 and the burst goes on. `goes_on` alone decides,
        # except where `alone` is true too. Then a pause in state 1 ends in a single loss, and the next pause is in
        # state 1; a pause in state 2 ends in a run in state 3, and the next pause is in state 2.
        known = np.where(alone & goes_on, 0, np.arange(1, count + 1))
        known = np.maximum.accumulate(known)
        handed = np.where(known > 0, goes_on[known - 1], self._next_within)
        within = np.concatenate(([self._next_within], handed[:-1]))
        self._next_within = bool(handed[-1])

        pauses = np.where(within, geometric(leave_pause, numbers[:, 2]), geometric(leave_gap, numbers[:, 2]))
        lengths = np.where(alone & ~within, 1, geometric(leave_losses, numbers[:, 3]))
        if self._drawn == 0 and self._first_state in (LOST_IN_BURST, LOST_ALONE):
            pauses[0] = 0
        ends = np.cumsum(pauses + lengths) + self._drawn_to
        self._drawn += count
        self._drawn_to = int(ends[-1])
        return np.stack([ends - lengths, ends, within])

    def take(self, num_packets: int) -> np.ndarray:
        """Return the sorted indices of the losses among the next `num_packets` packets, from 0: int64 (num_lost,)."""
        first = self._packets
        end = self._packets = first + num_packets
        if not self._cycles_per_packet:
            return np.arange(num_packets) if self._process.loss_rate else NO_PACKETS
        if self._runs[0, self._cursor] >= end:
            return NO_PACKETS
        if self._drawn_to <= end:
            self._draw_past(end)
        starts, ends, _ = self._runs[:, self._cursor :]
        begun = int(starts.searchsorted(end))
        over = begun - int(ends[begun - 1] > end)
        if over:
            self._cycle += over
            self._cycle_start = int(ends[over - 1])
            self._cursor += over
        starts, ends = np.maximum(starts[:begun], first) - first, np.minimum(ends[:begun], end) - first
        lengths = ends - starts
        before = np.cumsum(lengths) - lengths
        return np.repeat(starts - before, lengths) + np.arange(lengths.sum())

    def state_dict(self) -> dict:
        """Return all that resuming needs besides the process and the key, as JSON-ready values."""
        return {
            "packets": self._packets,
            "cycle": self._cycle,
            "cycle_start": self._cycle_start,
            "within_burst": bool(self._runs[2, self._cursor]) if self._cycles_per_packet else self._next_within,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from `state_dict()`."""
        self._restart(**state)
