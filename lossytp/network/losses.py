"""Loss processes: which packets a link loses. Bernoulli, Gilbert-Elliott, netem's four states, presets, notation.

A loss process is any object with the four members of `LossProcess`. `losses(key)` gives the losses of one link. The
key, such as ``(seed, "training", 0, "tp", src, dst)``, names the link's random numbers. So every rank of a group
computes the same losses without a message, in any process layout, on any device, and after a resume.
"""

import math
import re
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lossytp.network.checks import check_at_most, check_known, check_probability, is_finite, refuse_if, shown
from lossytp.network.random_numbers import NEVER, Key, block_size, geometric
from lossytp.network.random_numbers import Normals as Normals  # imported from here by others
from lossytp.network.random_numbers import Stream as Stream

NO_PACKETS = np.empty(0, dtype=np.int64)
NO_PACKETS.setflags(write=False)


class LinkLosses(Protocol):
    """The losses of one link, in order."""

    def take(self, num_packets: int) -> np.ndarray:
        """Return the sorted indices of the losses among the next `num_packets` packets, from 0: int64 (num_lost,).

        Taking n packets at once or in pieces gives the same losses.
        """
        ...

    def state_dict(self) -> dict:
        """Return all that resuming needs besides the process and the key, as JSON-ready values."""
        ...

    def load_state_dict(self, state: dict) -> None:
        """Resume from `state_dict()`: the next losses are those of a link that never stopped."""
        ...


@runtime_checkable
class LossProcess(Protocol):
    """A stationary law of losses. Every link has its own copy."""

    @property
    def loss_rate(self) -> float:
        """Return the stationary probability that a packet is lost."""
        ...

    @property
    def mean_burst_packets(self) -> float:
        """Return the mean run of consecutive losses; 0 without losses, infinite if all packets are lost."""
        ...

    def autocorrelation(self, lag: int) -> float:
        """Return the correlation of the loss indicators of two packets `lag` apart; 0 if they never vary."""
        ...

    def losses(self, key: Key) -> LinkLosses:
        """Return the losses of one link, drawn from the streams below `key`, which ends in (..., group, src, dst)."""
        ...


def check_process(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a loss process."""
    if isinstance(value, type) or not isinstance(value, LossProcess):
        raise ValueError(f"{name} = {shown(value)} is not a loss process: give one, such as Bernoulli(loss_rate=0.01)")


class ClosedForms:
    """Give a process its autocorrelation and mean burst, from its `loss_rate` and `covariance(lag)` at lags above 0."""

    def autocorrelation(self: Any, lag: int) -> float:
        variance = self.loss_rate * (1 - self.loss_rate)
        return self.covariance(lag) / variance if lag and variance else float(lag == 0)

    @property
    def mean_burst_packets(self: Any) -> float:
        """Return the loss rate divided by P(a packet is lost and the one before it is not)."""
        rate = self.loss_rate
        both_lost = rate**2 + self.autocorrelation(1) * rate * (1 - rate)
        if rate == 0:
            return 0.0
        return math.inf if both_lost >= rate else rate / (rate - both_lost)


def _percent(*values: float) -> str:
    return " ".join(f"{100 * value:.10g}%" for value in values)


# Bernoulli losses, sampled by gaps, so that the cost grows with the losses and not with the packets.


@dataclass(frozen=True, kw_only=True)
class Bernoulli(ClosedForms):
    """Each packet is lost independently with probability `loss_rate`, in [0, 1]."""

    loss_rate: float

    def __post_init__(self) -> None:
        check_probability("loss_rate", self.loss_rate)

    def covariance(self, lag: int) -> float:
        return 0.0

    def to_netem(self) -> str:
        """Return the process in the notation of Linux ``tc netem``."""
        return f"loss random {_percent(self.loss_rate)}"

    def losses(self, key: Key) -> "BernoulliLosses":
        return BernoulliLosses(self.loss_rate, key)


class BernoulliLosses:
    """Find a link's lost packets by drawing the gaps between losses.

    The gaps come in order from one stream, so the size of the blocks in which they are drawn changes nothing.
    """

    def __init__(self, loss_rate: float, key: Key) -> None:
        self._loss_rate, self._gaps = loss_rate, Stream((*key, "gaps"))
        self._restart(packets=0, losses=0, last_lost=-1)

    def _restart(self, *, packets: int, losses: int, last_lost: int) -> None:
        self._packets = packets  # taken so far
        self._losses, self._last_lost = losses, last_lost  # of these packets
        self._gaps.seek(losses)
        self._next_lost = NEVER
        if 0 < self._loss_rate < 1:
            self._draw_block(after=last_lost, needed_packets=0)
            self._next_lost = int(self._upcoming[0])

    def _draw_block(self, *, after: int, needed_packets: int) -> None:
        """Set `_upcoming` to the next sorted losses after packet `after`, counted from the link's first packet."""
        block = block_size(needed_packets * self._loss_rate)
        self._upcoming = geometric(self._loss_rate, self._gaps.uniforms(block))
        np.cumsum(self._upcoming, out=self._upcoming)
        self._upcoming += after
        self._cursor = 0  # how many of `_upcoming` were taken

    def take(self, num_packets: int) -> np.ndarray:
        first = self._packets
        end = self._packets = first + num_packets
        if self._loss_rate == 1:
            return np.arange(num_packets)
        if self._next_lost >= end:
            return NO_PACKETS
        pieces = []
        while (last := int(self._upcoming[-1])) < end:
            pieces.append(self._upcoming[self._cursor :])
            self._draw_block(after=last, needed_packets=end - last)
        stop = int(self._upcoming.searchsorted(end))
        pieces.append(self._upcoming[self._cursor : stop])
        lost = np.concatenate(pieces)
        self._losses += len(lost)
        self._last_lost = int(lost[-1])
        self._cursor = stop
        self._next_lost = int(self._upcoming[stop])
        lost -= first
        return lost

    def state_dict(self) -> dict:
        return {"packets": self._packets, "losses": self._losses, "last_lost": self._last_lost}

    def load_state_dict(self, state: dict) -> None:
        self._restart(**state)


# Gilbert-Elliott losses: a Markov chain of two states that steps once per packet.
#
# Gilbert, "Capacity of a burst-noise channel", 1960; Elliott, "Estimates of error rates for codes on burst-noise
# channels", 1963. The state before a packet's transition decides its loss, as in Linux's ``net/sched/sch_netem.c``.

GOOD, BAD = 0, 1


@dataclass(frozen=True, kw_only=True)
class GilbertElliott(ClosedForms):
    """Two states, each with its own loss probability. All four parameters are probabilities per packet.

    With `loss_bad` = 1 and `loss_good` = 0 it is the simple Gilbert channel: a sojourn in the bad state is a burst.
    """

    p_good_to_bad: float
    p_bad_to_good: float
    loss_bad: float = 1.0
    loss_good: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_probability(field.name, getattr(self, field.name))
        if self.p_good_to_bad == self.p_bad_to_good == 0:
            raise ValueError("p_good_to_bad = p_bad_to_good = 0 has no stationary loss rate: give one a value above 0")

    @classmethod
    def from_loss_and_burst(cls, *, loss_rate: float, mean_burst_packets: float) -> "GilbertElliott":
        """Return the simple Gilbert channel with this stationary loss rate and mean run of consecutive losses.

        Raises:
            ValueError: if there is no such channel, because the mean burst is below max(1, rate / (1 - rate)) packets.
        """
        check_probability("loss_rate", loss_rate)
        shortest = max(1.0, loss_rate / (1 - loss_rate)) if loss_rate < 1 else math.inf
        fits = is_finite(mean_burst_packets) and mean_burst_packets >= shortest * (1 - 1e-12)
        fault = f"does not fit loss_rate = {loss_rate:g}: give a finite number from {shortest:g} on, or use Bernoulli"
        refuse_if(not fits, "mean_burst_packets", mean_burst_packets, fault)
        p_bad_to_good = min(1.0, 1 / mean_burst_packets)
        p_good_to_bad = min(1.0, loss_rate * p_bad_to_good / (1 - loss_rate))
        return cls(p_good_to_bad=p_good_to_bad, p_bad_to_good=p_bad_to_good)

    @property
    def share_bad(self) -> float:
        """Return the stationary probability of the bad state."""
        return self.p_good_to_bad / (self.p_good_to_bad + self.p_bad_to_good)

    @property
    def loss_rate(self) -> float:
        return self.share_bad * self.loss_bad + (1 - self.share_bad) * self.loss_good

    def covariance(self, lag: int) -> float:
        """Return the covariance of the states' loss probabilities: the chain's second eigenvalue is 1 - p - r."""
        between_states = self.share_bad * (1 - self.share_bad) * (self.loss_bad - self.loss_good) ** 2
        return between_states * (1 - self.p_good_to_bad - self.p_bad_to_good) ** abs(lag)

    def to_netem(self) -> str:
        """Return the process in the notation of Linux ``tc netem``: ``gemodel p r 1-h 1-k``."""
        return "loss gemodel " + _percent(self.p_good_to_bad, self.p_bad_to_good, self.loss_bad, self.loss_good)

    def losses(self, key: Key) -> "GilbertElliottLosses":
        return GilbertElliottLosses(self, key)


class GilbertElliottLosses:
    """Find a link's lost packets by drawing sojourns, and losses on each state's own clock.

    The chain visits good and bad in turn; `ends[i]` is the packet at which sojourn i ends. A packet in a state is
    one tick of that state's clock, on which losses are Bernoulli. The class maps ticks back to packets.
    """

    def __init__(self, process: GilbertElliott, key: Key) -> None:
        self._leave = (process.p_good_to_bad, process.p_bad_to_good)
        self._lost_ticks = (
            BernoulliLosses(process.loss_good, (*key, "good")),
            BernoulliLosses(process.loss_bad, (*key, "bad")),
        )
        self._sojourns = (Stream((*key, "good", "sojourns")), Stream((*key, "bad", "sojourns")))
        self._lossless_state = (process.loss_good == 0, process.loss_bad == 0)
        self._first_state = int(Stream((*key, "initial")).uniforms(1)[0] < process.share_bad)
        self._restart(packets=0, sojourn=0, sojourn_start=0)

    def _restart(self, *, packets: int, sojourn: int, sojourn_start: int) -> None:
        self._packets = packets  # taken so far
        self._sojourn = sojourn  # index of the one that the next packet falls in
        self._sojourn_start = sojourn_start
        self._ends = NO_PACKETS  # from `_cursor` on: ends of sojourns `sojourn`, `sojourn + 1`, ...
        self._cursor = 0
        for state in (GOOD, BAD):  # skip this state's earlier sojourns: every second one, counted from the first state
            self._sojourns[state].seek((sojourn + (state == self._first_state)) // 2)
        self._draw_up_to(packets)
        self._end = int(self._ends[0])

    def _state(self, sojourn: int) -> int:
        return (self._first_state + sojourn) % 2

    def _draw_up_to(self, packet: int) -> None:
        """Extend `_ends` until it holds an end after `packet`."""
        blocks = [self._ends[self._cursor :]]
        drawn = self._sojourn + len(blocks[0])
        last = int(self._ends[-1]) if len(self._ends) else self._sojourn_start
        while last <= packet:
            pairs = 1  # enough with an absorbing state: the chain moves once at most
            if 0 not in self._leave:
                pairs = block_size((packet - last) / (1 / self._leave[GOOD] + 1 / self._leave[BAD]))
            lengths = np.empty(2 * pairs, dtype=np.int64)
            for parity in (0, 1):
                state = self._state(drawn + parity)
                leave = self._leave[state]
                lengths[parity::2] = geometric(leave, self._sojourns[state].uniforms(pairs)) if leave else NEVER
            ends = np.cumsum(lengths, out=lengths)
            ends += last
            last = int(ends[-1])
            drawn += 2 * pairs
            blocks.append(ends)
        self._ends = np.concatenate(blocks)
        self._cursor = 0

    def take(self, num_packets: int) -> np.ndarray:
        first = self._packets
        end = self._packets = first + num_packets
        if self._end > end:  # the current sojourn outlasts the message
            state = self._state(self._sojourn)
            return NO_PACKETS if self._lossless_state[state] else self._lost_ticks[state].take(num_packets)
        if self._ends[-1] <= end:
            self._draw_up_to(end)
        stop = int(self._ends.searchsorted(end, side="right"))  # the sojourn that packet `end` falls in
        inner = self._ends[self._cursor : stop]
        edges = np.concatenate(([first], inner, [end])) - first
        lost = [self._lost_in(state, edges) for state in (GOOD, BAD) if not self._lossless_state[state]]
        self._sojourn += len(inner)
        self._sojourn_start = int(inner[-1])
        self._cursor = stop
        self._end = int(self._ends[stop])
        return np.sort(np.concatenate(lost)) if len(lost) == 2 else lost[0] if lost else NO_PACKETS

    def _lost_in(self, state: int, edges: np.ndarray) -> np.ndarray:
        """Return the packets lost in `state`; sojourn i of the message spans packets edges[i] to edges[i + 1]."""
        parity = int(self._state(self._sojourn) != state)
        starts = edges[:-1][parity::2]
        ticks_before = np.concatenate(([0], np.cumsum(np.diff(edges)[parity::2])))
        lost_ticks = self._lost_ticks[state].take(int(ticks_before[-1]))
        sojourn = ticks_before.searchsorted(lost_ticks, side="right") - 1
        return starts[sojourn] + (lost_ticks - ticks_before[sojourn])

    def state_dict(self) -> dict:
        own = {"packets": self._packets, "sojourn": self._sojourn, "sojourn_start": self._sojourn_start}
        return own | {"good": self._lost_ticks[GOOD].state_dict(), "bad": self._lost_ticks[BAD].state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self._lost_ticks[GOOD].load_state_dict(state["good"])
        self._lost_ticks[BAD].load_state_dict(state["bad"])
        self._restart(**{name: state[name] for name in ("packets", "sojourn", "sojourn_start")})


# The four-state Markov chain of Linux ``tc netem loss state``: bursts with gaps in them, and single losses.
#
# Salsano, Ludovici, Ordine and Giuliano, "Definition of a general and intuitive loss model for packet networks and its
# implementation in the Netem module in the Linux kernel", 2012. The states: 1 delivered between bursts, 2 delivered
# within a burst, 3 lost within a burst, 4 a single loss between bursts. State 1 always follows state 4. As in the
# kernel the chain steps first, and the new state decides the loss. The kernel starts in state 1; a link here starts
# stationary, which gives the losses the same law as deciding by the state before the step.

IS_LOST = np.array([0.0, 0.0, 1.0, 1.0])
WITHIN_BURST, LOST_IN_BURST, LOST_ALONE = 1, 2, 3  # states 2, 3 and 4, counted from 0
ROUNDING = 1e-9  # of `to_netem`, which writes ten digits


@dataclass(frozen=True)
class FourState(ClosedForms):
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
        for field in fields(self):
            check_probability(field.name, getattr(self, field.name))
        for one, other in (("p13", "p14"), ("p31", "p32")):
            total = getattr(self, one) + getattr(self, other)
            check_at_most(f"{one} + {other}", total, 1 + ROUNDING, "two that add up to 1 or less")

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
        return float(self.shares @ IS_LOST)

    @property
    def bursts_per_packet(self) -> float:
        """Return the runs of consecutive losses per packet: a run is a sojourn in state 3, or one packet in state 4."""
        return float(self.shares[LOST_ALONE] + self.shares[LOST_IN_BURST] * self.leave_losses)

    @property
    def mean_burst_packets(self) -> float:
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

    def covariance(self, lag: int) -> float:
        both_lost = (self.shares * IS_LOST) @ np.linalg.matrix_power(self.transition, abs(lag)) @ IS_LOST
        return float(both_lost - self.loss_rate**2)

    def to_netem(self) -> str:
        """Return the process in the notation of Linux ``tc netem``: ``state p13 p31 p32 p23 p14``."""
        return "loss state " + _percent(self.p13, self.p31, self.p32, self.p23, self.p14)

    def losses(self, key: Key) -> "FourStateLosses":
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
        within = self._first_state in (WITHIN_BURST, LOST_IN_BURST)
        self._restart(packets=0, cycle=0, cycle_start=0, within_burst=within)

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
        within = bool(self._runs[2, self._cursor]) if self._cycles_per_packet else self._next_within
        state = {"packets": self._packets, "cycle": self._cycle, "cycle_start": self._cycle_start}
        return state | {"within_burst": within}

    def load_state_dict(self, state: dict) -> None:
        self._restart(**state)


# The Gilbert-Elliott settings of an earlier study, whose command lines pass these ids, spelling mistakes included, to
# ``--ge_config``. Several ids state a loss rate that differs from that of their values: trust `loss_rate`, not the id.

PRESETS = {
    name: GilbertElliott(p_good_to_bad=leave, p_bad_to_good=back, loss_good=good, loss_bad=bad)
    for name, leave, back, good, bad in (
        ("zero", 0, 1, 0, 1),
        ("default", 0.05, 0.45, 0, 1),
        ("one", 0.01, 0.19, 0, 1),
        ("one_precent", 0.005, 0.3, 0, 0.65),
        ("half_percent", 0.001, 0.2, 0, 1),
        ("point2_percent", 0.001, 0.45, 0.0001, 0.86),
        ("long_point1_percent", 0.00005, 0.04995, 0, 1),
        ("long_point1percent", 0.00098, 0.98, 0, 1),
        ("long_2percent", 0.0004, 0.0196, 0, 1),
        ("lomg_2percent", 0.02, 0.98, 0, 1),
        ("short_2percent", 0.0102, 0.5, 0, 1),
        ("short_1percent", 0.00606, 0.6, 0, 1),
        ("short_half_percent", 0.00303, 0.6, 0, 1),
        ("short_point_2percent", 0.00121, 0.6, 0, 1),
        ("short_point1_percent", 0.001001, 0.999, 0, 1),
        ("20_loss", 0.245, 0.98, 0, 1),
        ("long_50percent", 0.98, 0.98, 0, 1),
        ("short_50percent", 0.5, 0.5, 0, 1),
        ("90_loss", 1, 0.11111, 0, 1),
    )
}


def gilbert_elliott_preset(name: str) -> GilbertElliott:
    """Return the preset with this id.

    Raises:
        ValueError: if no preset has this id; the message lists the ids.
    """
    check_known("ge_config", name, PRESETS)
    return PRESETS[name]


NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?%?"


def from_netem(text: str) -> Bernoulli | GilbertElliott | FourState:
    """Return the process that ``tc netem`` runs for `text`.

    The text is ``loss [random] 1%``, ``loss gemodel p [r [1-h [1-k]]]`` or ``loss state p13 [p31 [p32 [p23 [p14]]]]``.
    Percent signs are optional, as for tc. Values that are left out have netem's defaults (r = 1 - p, 1-h = 100 %, 1-k =
    0 %; p31 = 1 - p13, p32 = 0 %, p23 = 100 %, p14 = 0 %).

    Raises:
        ValueError: if the text has another form, asks for netem's correlation, or gives more than 100 %.
    """
    words = str(text).split()
    values = [word for word in words if re.fullmatch(NUMBER, word)]
    kind, end = " ".join(words[: len(words) - len(values)]), words[len(words) - len(values) :]
    numbers = [float(value.rstrip("%")) / 100 for value in values] if end == values else []
    if numbers and all(0 <= number <= 1 for number in numbers):
        if kind in ("loss", "loss random") and len(numbers) == 1:
            return Bernoulli(loss_rate=numbers[0])
        if kind == "loss gemodel" and len(numbers) <= 4:
            leave, back, bad, good = numbers + [1 - numbers[0], 1.0, 0.0][len(numbers) - 1 :]
            return GilbertElliott(p_good_to_bad=leave, p_bad_to_good=back, loss_bad=bad, loss_good=good)
        if kind == "loss state" and len(numbers) <= 5:
            return FourState(*numbers, *[1 - numbers[0], 0.0, 1.0, 0.0][len(numbers) - 1 :])
    fix = "write 'loss random 1%', 'loss gemodel 1% 19% 100% 0%' or 'loss state 1% 20% 5% 30% 0.1%', with 0 to 100 %"
    raise ValueError(f"netem = {shown(text)} is not understood: {fix}")
