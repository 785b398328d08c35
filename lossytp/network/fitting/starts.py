"""Compute the parameters, in closed form, from which maximisation of the likelihood starts."""

from collections.abc import Sequence

import numpy as np

from lossytp.network.fitting import runs
from lossytp.network.fitting.families import BERNOULLI, FOUR_STATE, GILBERT, GILBERT_ELLIOTT, Family
from lossytp.network.trace import Trace

EDGE = 1e-6  # starts stay this far from 0 and 1, where maximisation would be stuck
GOOD_SHARES = (0.01, 0.5)  # candidates for the good state's loss rate, as shares of the overall one
ALONE_SHARES = (0.05, 0.9)  # candidates for the share of one-packet bursts that are in state 4
LEAST_VARIANCE = 1e-3  # of equal counts in all windows, as a share of the variance of independent losses
MEMORIES = np.logspace(-5, -0.01, 200)  # candidates for p_good_to_bad + p_bad_to_good


def starts(family: Family, flows: Sequence[Trace]) -> list[np.ndarray]:
    """Return parameters from which to start, (P,) each. The flows have both lost and received packets."""
    rate = runs.num_lost(flows) / runs.num_packets(flows)
    bursts = runs.burst_lengths(flows)
    if family is BERNOULLI:
        found = [np.array([rate])]
    elif family is GILBERT:
        back = 1 / bursts.mean()
        found = [np.array([back * rate / (1 - rate), back])]
    elif family is GILBERT_ELLIOTT:
        found = [gilbert_elliott_moments(flows, good_share) for good_share in GOOD_SHARES]
    else:
        assert family is FOUR_STATE, family
        found = [_four_state(flows, alone) for alone in ALONE_SHARES]
    return [np.clip(values, EDGE, 1 - EDGE) for values in found]


def gilbert_elliott_moments(flows: Sequence[Trace], good_share: float) -> np.ndarray:
    """Match the loss rate and the variance of the losses in windows of several lengths.

    Hasslinger and Hohlfeld, "The Gilbert-Elliott model for packet loss in real time services on the Internet", 2008:
    the number of losses in w packets has the variance w m (1 - m) (1 + 2 c s(w)), with the loss rate m, the losses'
    autocorrelation c x^lag, x = 1 - p - r, and s(w) = sum_lag (1 - lag / w) x^lag. The variance fixes x and c, by
    least squares over w = 2, 4, 8, ..., weighted by the number of windows, since a variance of n values has a relative
    error of about sqrt(2 / n). One parameter stays free: the good state's loss rate.

    Args:
        flows: flows with lost and received packets.
        good_share: the good state's loss rate, as a share of all packets' loss rate; below 1.

    Returns:
        p_good_to_bad, p_bad_to_good, loss_bad and loss_good, (4,).
    """
    windows, counts, excess = _excess_variance(flows)
    rate = runs.num_lost(flows) / runs.num_packets(flows)
    good = good_share * rate
    memory, correlation = 0.5, 0.0
    if len(windows):
        shape = 2 * np.array([_lag_sums(1 - each, windows) for each in MEMORIES])
        weights = counts / np.maximum(1 + excess, LEAST_VARIANCE) ** 2
        amounts = np.maximum(shape @ (weights * excess) / (shape**2 @ weights), 0.0)
        misfit = (amounts[:, None] * shape - excess) ** 2 @ weights
        memory, correlation = MEMORIES[misfit.argmin()], amounts[misfit.argmin()]
    bad = min(rate + max(correlation, 0.01) * rate * (1 - rate) / (rate - good), 1 - EDGE)
    share_bad = (rate - good) / (bad - good)
    return np.array([share_bad * memory, (1 - share_bad) * memory, bad, good])


def _lag_sums(decay: float, windows: np.ndarray) -> np.ndarray:
    """Return sum over lags from 1 to w - 1 of (1 - lag / w) decay^lag, for each window w."""
    step = 1 - decay
    return decay / step * (1 - (1 - decay**windows) / (windows * step))


def _excess_variance(flows: Sequence[Trace]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return window lengths, numbers of windows, and the excess variances of their losses.

    The excess is the variance relative to that of independent losses, minus 1. A length is used while there are at
    least 30 such windows.
    """
    rate = runs.num_lost(flows) / runs.num_packets(flows)
    found = []
    window = 2
    while (count := sum(flow.num_packets // window for flow in flows)) >= 30:
        squares = 0
        for flow in flows:
            inside = np.asarray(flow.lost) // window
            inside = inside[inside < flow.num_packets // window]
            squares += int((np.unique(inside, return_counts=True)[1] ** 2).sum())
        variance = squares / count - (window * rate) ** 2
        found.append((window, count, variance / (window * rate * (1 - rate)) - 1))
        window *= 2
    windows, counts, excess = np.array(found, dtype=float).reshape(-1, 3).T
    return windows, counts, excess


def _four_state(flows: Sequence[Trace], alone: float) -> np.ndarray:
    """Split gaps into pauses within a burst and gaps between bursts, and give state 4 a share of the single losses.

    Args:
        flows: flows with lost and received packets.
        alone: share of one-packet bursts that are in state 4.
    """
    bursts, gaps = runs.burst_lengths(flows), runs.gap_lengths(flows)
    if not len(gaps):
        gaps = np.array([runs.num_packets(flows)])
    pauses, within = _two_geometrics(gaps)
    single = (bursts == 1).mean() * alone
    leave = 1 / max((bursts.mean() - single) / max(1 - single, EDGE), 1.0)
    leave_gap = min(1.0, 1 / pauses[1])
    back = leave * (1 - within)
    return np.array([leave_gap * (1 - single), back, leave - back, min(1.0, 1 / pauses[0]), leave_gap * single])


def _two_geometrics(lengths: np.ndarray) -> tuple[np.ndarray, float]:
    """Fit two mixed geometric distributions by a few EM steps; return their means, ascending, and the first's share."""
    values, counts = np.unique(lengths, return_counts=True)
    means = np.array([max(1.01, np.median(lengths) / 2), max(2.0, 2 * lengths.mean())])
    short = 0.5
    for _ in range(50):
        logs = -np.log(means) + (values[:, None] - 1) * np.log1p(-1 / means) + np.log([short, 1 - short])
        weight = np.exp(logs - logs.max(axis=1, keepdims=True))
        weight = weight / weight.sum(axis=1, keepdims=True) * counts[:, None]
        totals = np.maximum(weight.sum(axis=0), EDGE)
        means = np.maximum(weight.T @ values / totals, 1 + EDGE)
        short = float(np.clip(totals[0] / totals.sum(), EDGE, 1 - EDGE))
    return np.sort(means), short if means[0] <= means[1] else 1 - short
