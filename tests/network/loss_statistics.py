"""Statistics of lost packets, with standard errors that hold although packets are correlated.

Standard errors are by batch means: the packets (or bursts) are cut, in order, into 100 batches, each far longer than
the chain remembers, so that their means are all but independent. The mean of these means is the estimate, and their
standard deviation / sqrt(100) its standard error. The formula for independent packets would be too small by
sqrt(1 + 2 * sum of the autocorrelations): 13 times at a mean burst of 100 and a loss rate of 0.1.
"""

import numpy as np
from hypothesis import settings

NUM_BATCHES = 100
NUM_STANDARD_ERRORS = 4
BURSTS_FOR_A_BATCH_MEAN = 500  # at least five a batch, for a batch's mean to be nearly normal

reproducible = settings(derandomize=True, deadline=None)


def batch_means(values):
    """Mean of a sequence and its standard error; a remainder of up to 99 values is left out."""
    batch = len(values) // NUM_BATCHES
    means = values[: batch * NUM_BATCHES].reshape(NUM_BATCHES, batch).mean(axis=1, dtype=np.float64)
    return means.mean(), means.std(ddof=1) / np.sqrt(NUM_BATCHES)


def is_within(estimate, expected, standard_errors=NUM_STANDARD_ERRORS):
    """Whether (value, standard error) is that near to what is expected."""
    value, standard_error = estimate
    return abs(value - expected) <= standard_errors * standard_error + 1e-12


def assert_within(estimate, expected, what):
    value, standard_error = estimate
    assert is_within(estimate, expected), f"{what}: {value:.6g} +- {standard_error:.2g}, expected {expected:.6g}"


def assert_same(one, other, what):
    """Two independent estimates agree within their joint standard error."""
    difference = one[0] - other[0], np.hypot(one[1], other[1])
    assert is_within(difference, 0), f"{what}: {one[0]:.6g} +- {one[1]:.2g} and {other[0]:.6g} +- {other[1]:.2g}"


def indicators(lost, num_packets):
    """1 for each lost packet and 0 for each delivered one, float32 (num_packets,)."""
    is_lost = np.zeros(num_packets, dtype=np.float32)
    is_lost[lost] = 1
    return is_lost


def correlation(one, other, rate):
    """Correlation of two sequences of loss indicators of a known loss rate, with its standard error."""
    value, standard_error = batch_means((one - np.float32(rate)) * (other - np.float32(rate)))
    return value / (rate * (1 - rate)), standard_error / (rate * (1 - rate))


def autocorrelation(is_lost, lag, rate):
    """Correlation of packets `lag` apart, with its standard error."""
    return correlation(is_lost[:-lag], is_lost[lag:], rate)


def burst_lengths(lost):
    """Lengths of the runs of consecutive losses, in order; without the first and last, which may be cut short."""
    starts = np.flatnonzero(np.diff(lost) > 1) + 1
    return np.diff(starts)


def longer_than(lengths, packets):
    """Share of bursts longer than `packets`, with its standard error."""
    return batch_means((lengths > packets).astype(np.float64))


def lengths_to_compare(lengths):
    """Up to 30 burst lengths, from 1 to the longest that enough bursts exceed."""
    longest = np.sort(lengths)[-BURSTS_FOR_A_BATCH_MEAN] - 1
    return np.unique(np.geomspace(1, max(longest, 1), 30).astype(int))


def chain(process):
    """Transition matrix (2, 2), loss probabilities (2,) and stationary law (2,) of a Gilbert-Elliott process."""
    leave, back = process.p_good_to_bad, process.p_bad_to_good
    transition = np.array([[1 - leave, leave], [back, 1 - back]])
    balance = np.vstack([transition.T - np.eye(2), np.ones(2)])
    stationary = np.linalg.lstsq(balance, np.array([0.0, 0.0, 1.0]), rcond=None)[0]
    return transition, np.array([process.loss_good, process.loss_bad]), stationary


def burst_start(process):
    """Law of the state at a burst's first packet, (2,), and the matrix of one more lost packet, (2, 2)."""
    transition, loss, stationary = chain(process)
    lose = transition @ np.diag(loss)
    start = stationary @ np.diag(1 - loss) @ lose
    return start / start.sum(), lose


def share_of_bursts_longer_than(process, packets):
    """The law of a Gilbert-Elliott burst's length, by matrix powers."""
    start, lose = burst_start(process)
    return (start @ np.linalg.matrix_power(lose, int(packets))).sum()
