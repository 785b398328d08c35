"""The interface of a loss process: any object with four members. `LOSS_PROCESSES` lists those of this project."""

import math
from typing import Protocol, runtime_checkable

import numpy as np

from lossytp.network.checks import shown
from lossytp.network.streams import Key


class LinkLosses(Protocol):
    """The losses of one link, in order."""

    def take(self, num_packets: int) -> np.ndarray:
        """Return the sorted indices of the losses among the next `num_packets` packets, from 0: int64 (num_lost,).

        Taking n packets at once or in pieces gives the same losses.
        """
        ...

    def state_dict(self) -> dict:
        """Return the state that resuming needs beside the process and the key, as JSON-ready values."""
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


def mean_burst(loss_rate: float, next_correlation: float) -> float:
    """Return the mean run of consecutive losses: rate / P(a packet is lost and the one before it is not).

    Args:
        loss_rate: the loss rate of the process.
        next_correlation: the autocorrelation at lag 1.
    """
    both_lost = loss_rate**2 + next_correlation * loss_rate * (1 - loss_rate)
    if loss_rate == 0:
        return 0.0
    return math.inf if both_lost >= loss_rate else loss_rate / (loss_rate - both_lost)
