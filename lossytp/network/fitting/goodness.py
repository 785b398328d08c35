"""How well a fit describes recorded flows: the laws of its bursts and gaps, against the recorded ones.

The statistic is Kolmogorov and Smirnov's: the largest distance between the recorded and the fitted distribution
function. Runs of one flow depend on each other and flows cut them short, so its p-value comes from recordings that the
fitted process itself simulates, with the flows' lengths. The simulated recordings are not fitted again, so the p-values
are rather too large: a small one is safe evidence against the fit.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lossytp.network.fitting import runs
from lossytp.network.fitting.fit import Fit
from lossytp.network.trace import Trace

SIMULATIONS, FEWEST_SIMULATIONS = 99, 19
MOST_FLOWS = 20_000  # simulated altogether: each costs about 0.1 ms


class Distance(NamedTuple):
    """The distance between a recorded and a fitted law.

    Attributes:
        statistic: the largest difference of the distribution functions, in [0, 1]; 0 without runs.
        p: the share of simulated recordings that are as far off or farther.
    """

    statistic: float
    p: float


class Goodness(NamedTuple):
    """How far off the fitted laws are.

    Attributes:
        bursts: of the lengths of runs of losses.
        gaps: of the lengths of runs of received packets between two losses.
        simulations: how many recordings the p-values come from.
    """

    bursts: Distance
    gaps: Distance
    simulations: int


def goodness(fit: Fit, flows: Sequence[Trace], seed: int = 0) -> Goodness:
    """Return how well the fit describes the flows. If all packets had the same fate, there is nothing to compare.

    Args:
        fit: of the flows.
        flows: the recorded flows.
        seed: of the simulated recordings.
    """
    if not 0 < runs.num_lost(flows) < fit.num_packets:
        return Goodness(Distance(0.0, 1.0), Distance(0.0, 1.0), 0)
    chain = fit.family.chain(np.array(fit.values))
    simulations = max(FEWEST_SIMULATIONS, min(SIMULATIONS, MOST_FLOWS // len(flows)))
    measures = (_Measure(runs.burst_lengths, chain.burst_survival), _Measure(runs.gap_lengths, chain.gap_survival))
    recorded = np.array([measure.distance(flows) for measure in measures])
    process = fit.process
    as_far = np.zeros(2)
    for number in range(simulations):
        simulated = [
            Trace(
                lost=process.losses((seed, "goodness", number, place)).take(flow.num_packets),
                num_packets=flow.num_packets,
            )
            for place, flow in enumerate(flows)
        ]
        as_far += np.array([measure.distance(simulated) for measure in measures]) >= recorded
    bursts, gaps = zip(recorded, (1 + as_far) / (1 + simulations), strict=True)
    return Goodness(Distance(*map(float, bursts)), Distance(*map(float, gaps)), simulations)


class _Measure(NamedTuple):
    lengths: Callable[[Sequence[Trace]], np.ndarray]
    survival: Callable[[np.ndarray], np.ndarray]

    def distance(self, flows: Sequence[Trace]) -> float:
        """Return the largest distance of the distribution functions, which is next to a recorded length."""
        lengths, counts = np.unique(self.lengths(flows), return_counts=True)
        if not len(lengths):
            return 0.0
        beyond = self.survival(np.concatenate([lengths, lengths + 1]))  # P(length >= each), P(length >= each + 1)
        at_least = counts[::-1].cumsum()[::-1] / counts.sum()
        longer = np.append(at_least[1:], 0.0)
        return float(np.abs(beyond - np.concatenate([at_least, longer])).max())
