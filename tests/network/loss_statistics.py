"""Statistics of lost packets, with standard errors that hold although packets are correlated.

Standard errors are by batch means: the packets (or bursts) are cut, in order, into 100 batches, each far longer than
the chain remembers, so that their means are all but independent. The mean of these means is the estimate, and their
standard deviation / sqrt(100) its standard error. The formula for independent packets would be too small by
sqrt(1 + 2 * sum of the autocorrelations): 13 times at a mean burst of 100 and a loss rate of 0.1.
"""

import itertools
import json

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from lossytp.network import Bernoulli, Correlated, FourState

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
    """Transition matrix (n, n), loss probabilities (n,) and stationary law (n,) of a hidden Markov process."""
    if isinstance(process, Bernoulli):
        return np.ones((1, 1)), np.array([process.loss_rate]), np.ones(1)
    if isinstance(process, Correlated):  # both chains at once; delivered where both deliver
        (one, one_loss, one_law), (other, other_loss, other_law) = chain(process.common), chain(process.private)
        return np.kron(one, other), 1 - np.kron(1 - one_loss, 1 - other_loss), np.kron(one_law, other_law)
    if isinstance(process, FourState):
        transition = np.zeros((4, 4))
        for step, probability in {(1, 3): process.p13, (1, 4): process.p14, (3, 1): process.p31}.items():
            transition[step[0] - 1, step[1] - 1] = probability
        transition[2, 1], transition[1, 2], transition[3, 0] = process.p32, process.p23, 1
        transition += np.diag(1 - transition.sum(axis=1))
        return transition, np.array([0.0, 0.0, 1.0, 1.0]), settled(transition)
    leave, back = process.p_good_to_bad, process.p_bad_to_good
    transition = np.array([[1 - leave, leave], [back, 1 - back]])
    balance = np.vstack([transition.T - np.eye(2), np.ones(2)])
    stationary = np.linalg.lstsq(balance, np.array([0.0, 0.0, 1.0]), rcond=None)[0]
    return transition, np.array([process.loss_good, process.loss_bad]), stationary


def settled(transition):
    """Where a chain that starts in its first state spends its time in the long run, (n,)."""
    lazy = (transition + np.eye(len(transition))) / 2  # the same law, without periods
    for _ in range(60):
        lazy = lazy @ lazy
        lazy /= lazy.sum(axis=1, keepdims=True)
    return lazy[0]


def autocorrelation_by_matrix(process, lag):
    transition, loss, stationary = chain(process)
    rate = stationary @ loss
    both_lost = stationary @ np.diag(loss) @ np.linalg.matrix_power(transition, lag) @ loss
    return (both_lost - rate**2) / (rate * (1 - rate))


def mean_burst_by_matrix(process):
    """Sum over k of P(length > k), which is start (I - lose)^-1 1."""
    start, lose = burst_start(process)
    return (start @ np.linalg.inv(np.eye(len(start)) - lose)).sum()


def burst_start(process):
    """Law of the state at a burst's first packet, (n,), and the matrix of one more lost packet, (n, n)."""
    transition, loss, stationary = chain(process)
    lose = transition @ np.diag(loss)
    start = stationary @ np.diag(1 - loss) @ lose
    return start / start.sum(), lose


def share_of_bursts_longer_than(process, packets):
    """The law of a burst's length in a hidden Markov process, by matrix powers."""
    start, lose = burst_start(process)
    return (start @ np.linalg.matrix_power(lose, int(packets))).sum()


def partitions(total):
    """Strategy for the edges of up to 13 pieces of `total` packets, some of them empty."""
    return st.lists(st.integers(0, total), max_size=12).map(lambda cuts: [0, *sorted(cuts), total])


def taken_in_pieces(losses, edges):
    return [start + losses.take(stop - start) for start, stop in itertools.pairwise(edges)]


def assert_any_pieces_lose_the_same(process, edges, key):
    whole = process.losses(key).take(edges[-1])
    assert whole.dtype == np.int64
    assert (np.diff(whole, prepend=-1) > 0).all()
    np.testing.assert_array_equal(np.concatenate(taken_in_pieces(process.losses(key), edges)), whole)


def assert_a_saved_state_resumes(process, edges, key):
    """Saved through JSON after those pieces, loaded into losses that have moved elsewhere."""
    losses, resumed = process.losses(key), process.losses(key)
    taken_in_pieces(losses, edges)
    resumed.take(1234)
    resumed.load_state_dict(json.loads(json.dumps(losses.state_dict())))
    assert resumed.state_dict() == losses.state_dict()
    for num_packets in (0, 17, 20_000):
        np.testing.assert_array_equal(resumed.take(num_packets), losses.take(num_packets))
    assert resumed.state_dict() == losses.state_dict()
