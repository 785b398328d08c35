"""Compute confidence intervals of a fit's parameters, loss rate and mean burst from the observed information.

The information is the negative second derivative of the log-likelihood on the scale of log odds. Intervals are
symmetric on that scale (the mean burst's on a log scale), by the delta method. There are two exceptions:

- Bernoulli's interval is exact (Clopper and Pearson 1934).
- A parameter that is fitted as 0 or 1 has no curvature there. Its interval ends where the log-likelihood, with the
  other parameters held fixed, is `DROP` nats lower. The intervals of loss rate and mean burst include their values at
  that end.

All intervals assume that the family is the true one and that flows are independent. Shapes: P parameters.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.special import expit, logit

from lossytp.network.bernoulli import Bernoulli
from lossytp.network.fitting import runs
from lossytp.network.fitting.families import BERNOULLI
from lossytp.network.fitting.fit import Fit
from lossytp.network.fitting.maximise import Likelihood
from lossytp.network.trace import Trace

CONFIDENCE = 0.95
QUANTILE = float(stats.norm.ppf((1 + CONFIDENCE) / 2))
DROP = float(stats.chi2.ppf(CONFIDENCE, 1)) / 2
FEWEST = 0.5  # with fewer expected events a parameter counts as 0 or 1, and a direction as flat
NEGLIGIBLE = 0.01  # smallest change of a parameter's log odds that counts, in a flat direction
STEP = 1e-3  # of log odds, for differences of gradients


class Interval(NamedTuple):
    """A 95 % confidence interval."""

    low: float
    high: float


def intervals(fit: Fit, flows: Sequence[Trace]) -> dict[str, Interval]:
    """Return the intervals of the parameters by name, of `loss_rate` and of `mean_burst_packets`.

    A parameter that the flows do not determine has the interval (0, 1).

    Args:
        fit: a fit of the flows.
        flows: the recorded flows.
    """
    if fit.family is BERNOULLI:
        return _exact(runs.num_lost(flows), fit.num_packets)
    likelihood = Likelihood(fit.family, flows)
    values = np.array(fit.values)
    odds = likelihood.odds(values)
    covariance, flat = _covariance(likelihood, odds)
    at_edge = _at_edge(likelihood, values)
    found, moved = {}, [values]
    for number, name in enumerate(fit.family.parameters):

        def log_odds(odds: np.ndarray, number: int = number) -> float:
            return float(logit(likelihood.values(odds)[number]))

        slope = _slope(log_odds, odds)
        if at_edge[number]:
            found[name] = _by_likelihood(likelihood, values, number)
            far = found[name].high if values[number] < 0.5 else found[name].low
            moved.append(np.where(np.arange(len(values)) == number, far, values))
        elif np.abs(slope @ flat).max(initial=0) > NEGLIGIBLE:
            found[name] = Interval(0.0, 1.0)
        else:
            found[name] = _between(expit, log_odds(odds), math.sqrt(slope @ covariance @ slope))
    for name, scale, back in (("loss_rate", logit, expit), ("mean_burst_packets", np.log, np.exp)):

        def measure(odds: np.ndarray, name: str = name, scale: Callable = scale) -> float:
            return float(scale(getattr(fit.family.process(likelihood.values(odds)), name)))

        slope = _slope(measure, odds)
        inner = _between(back, measure(odds), math.sqrt(slope @ covariance @ slope))
        at_ends = [getattr(fit.family.process(each), name) for each in moved]
        found[name] = Interval(min(inner.low, *at_ends, math.inf), max(inner.high, *at_ends, 0.0))
    return found


def _exact(lost: int, packets: int) -> dict[str, Interval]:
    """Return Bernoulli's intervals."""
    rate = stats.binomtest(lost, packets).proportion_ci(CONFIDENCE)
    ends = float(rate.low), float(rate.high)
    bursts = [Bernoulli(loss_rate=each).mean_burst_packets for each in ends]
    return {"loss_rate": Interval(*ends), "mean_burst_packets": Interval(*bursts)}


def _between(back: Callable[[float], float], centre: float, error: float) -> Interval:
    return Interval(float(back(centre - QUANTILE * error)), float(back(centre + QUANTILE * error)))


def _covariance(likelihood: Likelihood, odds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the inverse of the observed information, (P, P), and the flat directions, (P, directions)."""
    steps = STEP * np.eye(len(odds))
    second = np.array([likelihood.at(odds + step)[1] - likelihood.at(odds - step)[1] for step in steps]) / (2 * STEP)
    curvature, directions = np.linalg.eigh(-(second + second.T) / 2)
    seen = curvature > FEWEST
    return directions[:, seen] / curvature[seen] @ directions[:, seen].T, directions[:, ~seen]


def _at_edge(likelihood: Likelihood, values: np.ndarray) -> np.ndarray:
    """Return which parameters are less than `FEWEST` expected events away from 0 or 1, bool (P,)."""
    tally = likelihood.family.tally(likelihood.passes.expected(likelihood.family.chain(values)))
    return np.minimum(tally.chosen, tally.occasions - tally.chosen) < FEWEST


def _by_likelihood(likelihood: Likelihood, values: np.ndarray, number: int) -> Interval:
    """Return the interval of one parameter in which the log-likelihood is at most `DROP` below that of `values`."""
    best = likelihood.passes.log_likelihood(likelihood.family.chain(values))
    others = float(likelihood.family.same_row[number] @ values - values[number])  # parameters of the same choice
    inside, outside = float(values[number]), 1 - others if values[number] < 0.5 else 0.0
    for _ in range(40):
        tried = (inside + outside) / 2
        moved = np.where(np.arange(len(values)) == number, tried, values)
        dropped = best - likelihood.passes.log_likelihood(likelihood.family.chain(moved))
        inside, outside = (inside, tried) if dropped > DROP else (tried, outside)
    return Interval(0.0, outside) if values[number] < 0.5 else Interval(outside, 1.0)


def _slope(measure: Callable[[np.ndarray], float], odds: np.ndarray) -> np.ndarray:
    """Return the gradient of a function of the log odds, by central differences, (P,)."""
    steps = STEP * np.eye(len(odds))
    return np.array([measure(odds + step) - measure(odds - step) for step in steps]) / (2 * STEP)
