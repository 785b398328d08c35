"""Packet loss that the links of one switch share, for instance when its buffer overflows."""

import math
from dataclasses import dataclass

import numpy as np

from lossytp.network.bernoulli import Bernoulli
from lossytp.network.checks import check_is, check_probability, shown
from lossytp.network.gilbert_elliott import GilbertElliott
from lossytp.network.loss_process import LinkLosses, LossProcess, check_process, mean_burst
from lossytp.network.replay import Replay
from lossytp.network.streams import Key


@dataclass(frozen=True, kw_only=True)
class Correlated:
    """Lose a packet if its switch or its link loses it: `common` is drawn once per switch, `private` once per link.

    All links of a group that have this process and the same `switch` see the same common losses at the same time. Time
    is the number of packets that a link has sent, so links that send unequal numbers of packets drift apart. Links of
    different groups share nothing, because each group has its own clocks.
    """

    common: LossProcess
    private: LossProcess
    switch: int | str = 0

    def __post_init__(self) -> None:
        check_process("common", self.common)
        check_process("private", self.private)
        if isinstance(self.common, Replay):
            raise ValueError(
                f"common = {shown(self.common)} holds losses of single links: give it as private, or give "
                "common = Trace(...)"
            )
        check_is("switch", self.switch, (int, str), "its number or its name")

    @classmethod
    def from_loss_and_share(
        cls, *, loss_rate: float, shared: float, mean_burst_packets: float | None = None, switch: int | str = 0
    ) -> "Correlated":
        """Return a process with this loss rate. The switch loses the share `shared`, in [0, 1], of it.

        Both parts are Bernoulli. With a mean burst, both are simple Gilbert channels with equal bursts, and a link's
        runs of consecutive losses have that mean.

        Raises:
            ValueError: if no bursts are short enough.
        """
        check_probability("loss_rate", loss_rate)
        check_probability("shared", shared)
        common = shared * loss_rate
        private = (loss_rate - common) / (1 - common) if common < 1 else 0.0
        if mean_burst_packets is None:
            return cls(common=Bernoulli(loss_rate=common), private=Bernoulli(loss_rate=private), switch=switch)
        whole = GilbertElliott.from_loss_and_burst(loss_rate=loss_rate, mean_burst_packets=mean_burst_packets)
        # A link turns bad as often as `whole` if (1 - x r)(1 - y r) = 1 - whole.p_good_to_bad, with x and y the
        # parts' odds of loss and r their way out of a burst. The smaller root keeps both factors above 0.
        x, y = common / (1 - common), private / (1 - private)
        turn = whole.p_good_to_bad
        leave = 2 * turn / (x + y + math.sqrt((x + y) ** 2 - 4 * x * y * turn)) if turn else whole.p_bad_to_good
        if leave > 1 + 1e-12:
            shortest = loss_rate / ((1 - loss_rate) * (x + y - x * y))
            raise ValueError(
                f"mean_burst_packets = {mean_burst_packets!r} is too short for a loss rate of {loss_rate:g} and "
                f"shared = {shared:g}: give at least {shortest:.6g}"
            )
        leave = min(1.0, leave)
        parts = (GilbertElliott(p_good_to_bad=min(1.0, odds * leave), p_bad_to_good=leave) for odds in (x, y))
        return cls(common=next(parts), private=next(parts), switch=switch)

    @property
    def loss_rate(self) -> float:
        """Return the stationary probability that a packet is lost."""
        common, private = self.common.loss_rate, self.private.loss_rate
        return common + private - common * private

    def autocorrelation(self, lag: int) -> float:
        """Return the correlation of the loss indicators of two packets `lag` apart; 0 for a process that never varies.

        A delivered packet is delivered by both parts, so P(both delivered) is the product of theirs.
        """
        rate = self.loss_rate
        if lag == 0 or rate in (0, 1):
            return float(lag == 0)
        (common, common_covariance), (private, private_covariance) = (
            (part.loss_rate, part.autocorrelation(lag) * part.loss_rate * (1 - part.loss_rate))
            for part in (self.common, self.private)
        )
        covariance = (
            (1 - common) ** 2 * private_covariance
            + (1 - private) ** 2 * common_covariance
            + common_covariance * private_covariance
        )
        return covariance / (rate * (1 - rate))

    @property
    def mean_burst_packets(self) -> float:
        """Return the mean run of consecutive losses of one link; 0 without losses, infinite if all packets are lost."""
        return mean_burst(self.loss_rate, self.autocorrelation(1))

    def losses(self, key: Key) -> "CorrelatedLosses":
        """Return the losses of one link; the common ones do not depend on `key`'s src and dst."""
        private = (*key, "private")
        if isinstance(self.private, Correlated | Replay):  # which read the link at the key's end
            private = (*key[:-3], "private", *key[-3:])
        return CorrelatedLosses(self.common.losses((*key[:-2], "switch", self.switch)), self.private.losses(private))


class CorrelatedLosses:
    """Lose the packets that the switch loses and those that the link loses."""

    def __init__(self, common: LinkLosses, private: LinkLosses) -> None:
        self._common, self._private = common, private

    def take(self, num_packets: int) -> np.ndarray:
        """Return the sorted indices of the losses among the next `num_packets` packets, from 0: int64 (num_lost,)."""
        common, private = self._common.take(num_packets), self._private.take(num_packets)
        if not len(common) or not len(private):
            return common if len(common) else private
        lost = np.sort(np.concatenate([common, private]), kind="stable")  # merges two sorted arrays
        return lost[np.diff(lost, prepend=-1) > 0]

    @property
    def wraps(self) -> int | None:
        """Return the largest number of times that a trace has begun again; None if neither part replays one."""
        found = [getattr(part, "wraps", None) for part in (self._common, self._private)]
        return max((wraps for wraps in found if wraps is not None), default=None)

    def state_dict(self) -> dict:
        return {"common": self._common.state_dict(), "private": self._private.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self._common.load_state_dict(state["common"])
        self._private.load_state_dict(state["private"])
