"""Gilbert-Elliott packet loss: a two-state Markov chain that steps once per packet, its closed forms and its sampler.

Gilbert, "Capacity of a burst-noise channel", 1960; Elliott, "Estimates of error rates for codes on burst-noise
channels", 1963. The state before a packet's transition decides its loss, as in the Linux kernel's
``net/sched/sch_netem.c``.
"""

from dataclasses import dataclass

import numpy as np

from lossytp.network.bernoulli import NEVER, NO_PACKETS, BernoulliLosses, block_size, geometric
from lossytp.network.checks import check_probability, is_finite, shown
from lossytp.network.loss_process import mean_burst
from lossytp.network.streams import Key, Stream

GOOD, BAD = 0, 1


@dataclass(frozen=True, kw_only=True)
class GilbertElliott:
    """Two states, each with its own loss probability. All four parameters are probabilities per packet.

    With `loss_bad` = 1 and `loss_good` = 0 it is the simple Gilbert channel: a sojourn in the bad state is a burst.
    """

    p_good_to_bad: float
    p_bad_to_good: float
    loss_bad: float = 1.0
    loss_good: float = 0.0

    def __post_init__(self) -> None:
        for name in ("p_good_to_bad", "p_bad_to_good", "loss_bad", "loss_good"):
            check_probability(name, getattr(self, name))
        if self.p_good_to_bad == self.p_bad_to_good == 0:
            raise ValueError("p_good_to_bad = p_bad_to_good = 0 has no stationary loss rate: give one a value above 0")

    @classmethod
    def from_loss_and_burst(cls, *, loss_rate: float, mean_burst_packets: float) -> "GilbertElliott":
        """Return the simple Gilbert channel with this stationary loss rate and mean run of consecutive losses.

        Raises:
            ValueError: if there is no such channel, because the mean burst is below max(1, rate / (1 - rate)) packets.
        """
        check_probability("loss_rate", loss_rate)
        if loss_rate == 1:
            raise ValueError("loss_rate = 1 has no finite burst: use Bernoulli(loss_rate=1)")
        shortest = max(1.0, loss_rate / (1 - loss_rate))
        if not is_finite(mean_burst_packets) or mean_burst_packets < shortest * (1 - 1e-12):
            raise ValueError(
                f"mean_burst_packets = {shown(mean_burst_packets)} does not fit a loss rate of {loss_rate:g}: "
                f"give a finite number of at least {shortest:g} (Bernoulli's is {1 / (1 - loss_rate):.4g})"
            )
        p_bad_to_good = min(1.0, 1 / mean_burst_packets)
        p_good_to_bad = min(1.0, loss_rate * p_bad_to_good / (1 - loss_rate))
        return cls(p_good_to_bad=p_good_to_bad, p_bad_to_good=p_bad_to_good)

    @property
    def share_bad(self) -> float:
        """Return the stationary probability of the bad state."""
        return self.p_good_to_bad / (self.p_good_to_bad + self.p_bad_to_good)

    @property
    def loss_rate(self) -> float:
        """Return the stationary probability that a packet is lost."""
        return self.share_bad * self.loss_bad + (1 - self.share_bad) * self.loss_good

    def autocorrelation(self, lag: int) -> float:
        """Return the correlation of the losses of two packets `lag` apart; 0 for a process that never varies.

        The chain's second eigenvalue is 1 - p_good_to_bad - p_bad_to_good. Loss adds independent noise to each packet.
        """
        variance = self.loss_rate * (1 - self.loss_rate)
        if lag == 0 or variance == 0:
            return float(lag == 0)
        between_states = self.share_bad * (1 - self.share_bad) * (self.loss_bad - self.loss_good) ** 2
        return between_states * (1 - self.p_good_to_bad - self.p_bad_to_good) ** abs(lag) / variance

    @property
    def mean_burst_packets(self) -> float:
        """Return the mean run of consecutive losses; 0 without losses, infinite if all packets are lost."""
        return mean_burst(self.loss_rate, self.autocorrelation(1))

    def to_netem(self) -> str:
        """Return the process in the notation of Linux ``tc netem``: ``gemodel p r 1-h 1-k``."""
        values = (self.p_good_to_bad, self.p_bad_to_good, self.loss_bad, self.loss_good)
        return "loss gemodel " + " ".join(f"{100 * value:.10g}%" for value in values)

    def losses(self, key: Key) -> "GilbertElliottLosses":
        """Return the losses of one link, drawn from the streams below `key`."""
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
        for state in (GOOD, BAD):
            # this state's sojourns before number `sojourn`: every second one, counted from the first state
            before = (sojourn + (state == self._first_state)) // 2
            self._sojourns[state].seek(before)
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
            pairs = self._pairs_expected(packet - last)
            lengths = np.empty(2 * pairs, dtype=np.int64)
            for parity in (0, 1):
                state = self._state(drawn + parity)
                lengths[parity::2] = self._lengths(state, pairs)
            ends = np.cumsum(lengths, out=lengths)
            ends += last
            last = int(ends[-1])
            drawn += 2 * pairs
            blocks.append(ends)
        self._ends = np.concatenate(blocks)
        self._cursor = 0

    def _pairs_expected(self, packets: int) -> int:
        if 0 in self._leave:  # an absorbing state: the chain moves once at most
            return 1
        mean_cycle = 1 / self._leave[GOOD] + 1 / self._leave[BAD]
        return block_size(packets / mean_cycle)

    def _lengths(self, state: int, count: int) -> np.ndarray:
        if self._leave[state] == 0:
            return np.full(count, NEVER)
        return geometric(self._leave[state], self._sojourns[state].uniforms(count))

    def take(self, num_packets: int) -> np.ndarray:
        """Return the sorted indices of the losses among the next `num_packets` packets, from 0: int64 (num_lost,)."""
        first = self._packets
        end = first + num_packets
        if self._end > end:  # the current sojourn outlasts the message
            self._packets = end
            state = self._state(self._sojourn)
            return NO_PACKETS if self._lossless_state[state] else self._lost_ticks[state].take(num_packets)
        if self._ends[-1] <= end:
            self._draw_up_to(end)
        stop = int(self._ends.searchsorted(end, side="right"))  # the sojourn that packet `end` falls in
        inner = self._ends[self._cursor : stop]
        edges = np.concatenate(([first], inner, [end])) - first
        lost = [self._lost_in(state, edges) for state in (GOOD, BAD) if not self._lossless_state[state]]
        self._packets = end
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
        """Return all that resuming needs besides the process and the key, as JSON-ready values."""
        return {
            "packets": self._packets,
            "sojourn": self._sojourn,
            "sojourn_start": self._sojourn_start,
            "good": self._lost_ticks[GOOD].state_dict(),
            "bad": self._lost_ticks[BAD].state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from `state_dict()`."""
        for own, name in zip(self._lost_ticks, ("good", "bad"), strict=True):
            own.load_state_dict(state[name])
        self._restart(**{name: state[name] for name in ("packets", "sojourn", "sojourn_start")})
