"""Test how well a fit describes recorded flows, by the lengths of their bursts and gaps.

The fitted process simulates recordings with flows of the same lengths. The statistic is Kolmogorov and Smirnov's: the
largest distance between the distribution functions of the recorded lengths and of all simulated ones together. The
p-value is the share of simulated recordings that are at least as far off. So it allows for runs that depend on each
other, and for runs that the end of a flow cuts short. The simulated recordings are not fitted again, which makes
p-values too large rather than too small: a small one is safe evidence against the fit.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lossytp.network.fitting import runs
from lossytp.network.fitting.fit import Fit
from lossytp.network.trace import Trace

SIMULATIONS, FEWEST_SIMULATIONS = 99, 19
MOST_FLOWS = 20_000  # to simulate in all: each costs 0.05 to 0.2 ms
MEASURES = (runs.burst_lengths, runs.gap_lengths)


class Law(NamedTuple):
    """The distinct lengths of runs in packets, ascending, and how often each occurs: int64 (num_lengths,) each."""

    lengths: np.ndarray
    counts: np.ndarray

    def share_up_to(self, lengths: np.ndarray) -> np.ndarray:
        """Return the share of runs that are no longer than each of these lengths; 0 without runs."""
        total = np.concatenate([[0], self.counts.cumsum()])
        return total[self.lengths.searchsorted(lengths, side="right")] / max(int(total[-1]), 1)


class Comparison(NamedTuple):
    """A comparison of recorded lengths with those under the fit.

    Attributes:
        recorded: lengths in the recorded flows.
        fitted: lengths in all simulated flows together.
        statistic: largest difference between the distribution functions, in [0, 1].
        p: share of simulated recordings that are at least as far off.
    """

    recorded: Law
    fitted: Law
    statistic: float
    p: float


class Goodness(NamedTuple):
    """How well a fit describes recorded flows.

    Attributes:
        bursts: comparison of the runs of losses.
        gaps: comparison of the runs of received packets between two losses.
        simulations: number of simulated recordings, which give the p-values.
    """

    bursts: Comparison
    gaps: Comparison
    simulations: int


def goodness(fit: Fit, flows: Sequence[Trace], seed: int = 0, watch: Callable[[], object] = lambda: None) -> Goodness:
    """Return how well the fit describes the flows.

    Args:
        fit: a fit of the flows.
        flows: the recorded flows.
        seed: seed of the simulated recordings.
        watch: called after every simulated recording.
    """
    simulations = num_simulations(flows)
    process = fit.process
    laws: tuple[list[Law], list[Law]] = ([], [])
    for number in range(simulations):
        simulated = [
            Trace(
                lost=process.losses((seed, "goodness", number, place)).take(flow.num_packets),
                num_packets=flow.num_packets,
            )
            for place, flow in enumerate(flows)
        ]
        for law, measure in zip(laws, MEASURES, strict=True):
            law.append(_law(measure(simulated)))
        watch()
    bursts, gaps = (_compare(_law(measure(flows)), law) for law, measure in zip(laws, MEASURES, strict=True))
    return Goodness(bursts, gaps, simulations)


def num_simulations(flows: Sequence[Trace]) -> int:
    """Return how many recordings to simulate: the more flows, the fewer."""
    return max(FEWEST_SIMULATIONS, min(SIMULATIONS, MOST_FLOWS // len(flows)))


def _law(lengths: np.ndarray) -> Law:
    return Law(*np.unique(lengths, return_counts=True))


def _compare(recorded: Law, simulated: list[Law]) -> Comparison:
    lengths, place = np.unique(np.concatenate([law.lengths for law in simulated]), return_inverse=True)
    counts = np.bincount(place, np.concatenate([law.counts for law in simulated]), minlength=len(lengths))
    fitted = Law(lengths, counts.astype(np.int64))
    statistic = _distance(recorded, fitted)
    as_far = sum(_distance(law, fitted) >= statistic for law in simulated)
    return Comparison(recorded, fitted, statistic, (1 + as_far) / (1 + len(simulated)))


def _distance(one: Law, other: Law) -> float:
    lengths = np.union1d(one.lengths, other.lengths)
    return float(np.abs(one.share_up_to(lengths) - other.share_up_to(lengths)).max(initial=0.0))
