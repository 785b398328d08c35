"""The law of Gilbert-Elliott losses: over 10^7 packets against closed forms, and against a plain loop."""

import random

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.network.gilbert_elliott_processes import KEY, PROCESSES, general, simple
from tests.network.loss_statistics import (
    assert_same,
    assert_within,
    autocorrelation,
    batch_means,
    burst_lengths,
    chain,
    indicators,
    is_within,
    lengths_to_compare,
    longer_than,
    share_of_bursts_longer_than,
)

NUM_PACKETS = 10**7


# The law of what is drawn, within four standard errors over 10^7 packets


@pytest.fixture(scope="module", params=PROCESSES.values(), ids=PROCESSES)
def drawn(request):
    """A process and its losses among 10^7 packets, held against the closed forms."""
    return request.param, request.param.losses(KEY).take(NUM_PACKETS)


def test_loss_rate(drawn):
    process, lost = drawn
    observed = batch_means(indicators(lost, NUM_PACKETS))
    assert_within(observed, process.loss_rate, "loss rate")
    assert not is_within(observed, 1.2 * process.loss_rate)


def test_loss_rate_varies_as_much_as_the_correlations_say(drawn):
    """(1 + 2 * sum of the autocorrelations) times as much as independent packets': 179 times at a burst of 100.

    The variance of 100 batches is known to 14 %, so four of its standard errors are 57 %. Twice as much where two
    states that lose alike would draw their losses from one stream.
    """
    process, lost = drawn
    rate = process.loss_rate
    longest = NUM_PACKETS // 1000
    independent = rate * (1 - rate) / NUM_PACKETS
    expected = independent * (1 + 2 * sum(process.autocorrelation(lag) for lag in range(1, longest)))
    _, standard_error = batch_means(indicators(lost, NUM_PACKETS))
    assert standard_error**2 == pytest.approx(expected, rel=0.57)


def test_burst_lengths(drawn):
    process, lost = drawn
    lengths = burst_lengths(lost)
    assert_within(batch_means(lengths), process.mean_burst_packets, "mean burst")
    for packets in lengths_to_compare(lengths):
        expected = share_of_bursts_longer_than(process, packets)
        assert_within(longer_than(lengths, packets), expected, f"bursts longer than {packets}")


@pytest.mark.parametrize("lag", [1, 2, 5, 20, 100])
def test_autocorrelation(drawn, lag):
    process, lost = drawn
    observed = autocorrelation(indicators(lost, NUM_PACKETS), lag, process.loss_rate)
    assert_within(observed, process.autocorrelation(lag), f"lag {lag}")


def test_bursts_of_8_are_not_mistaken_for_another_law():
    """Control: the statistics tell a mean burst of 8 from 9, and its law from another of the same mean."""
    lengths = burst_lengths(simple(0.01, 8).losses(KEY).take(NUM_PACKETS))
    always_8 = np.full(len(lengths), 8)
    assert not is_within(batch_means(lengths), 9)
    assert not is_within(longer_than(lengths, 4), share_of_bursts_longer_than(simple(0.01, 9), 4))
    assert not is_within(longer_than(always_8, 4), share_of_bursts_longer_than(simple(0.01, 8), 4))


def test_a_link_starts_stationary():
    """Which of the first four packets are lost, over 5,000 links, against the matrix; a start in good would show."""
    process = general(0.1, 0.2, loss_bad=0.8, loss_good=0.1)
    patterns = np.zeros((2, 2, 2, 2))
    for link in range(5000):
        is_lost = indicators(process.losses((link, "test")).take(4), 4).astype(int)
        patterns[tuple(is_lost)] += 1
    transition, loss, stationary = chain(process)

    def expected(start):
        shares = np.zeros_like(patterns)
        for pattern in np.ndindex(shares.shape):
            state = start
            for position, is_lost in enumerate(pattern):
                state = (state if position == 0 else state @ transition) * (loss if is_lost else 1 - loss)
            shares[pattern] = state.sum()
        return shares.ravel() * 5000

    assert chisquare(patterns.ravel(), expected(stationary)).pvalue > 1e-4
    assert chisquare(patterns.ravel(), expected(np.array([1.0, 0.0]))).pvalue < 1e-4


# Against a plain loop


def losses_by_a_loop(process, num_packets, seed):
    """One packet after the other, as Linux's netem does: the state decides the loss, then the state may change."""
    generator = random.Random(seed)
    is_bad = generator.random() < process.share_bad
    lost = []
    for packet in range(num_packets):
        if generator.random() < (process.loss_bad if is_bad else process.loss_good):
            lost.append(packet)
        if generator.random() < (process.p_bad_to_good if is_bad else process.p_good_to_bad):
            is_bad = not is_bad
    return np.array(lost)


LOOP_PACKETS = 10**6


def measured(lost, rate):
    is_lost = indicators(lost, LOOP_PACKETS)
    lengths = burst_lengths(lost)
    estimates = {"loss rate": batch_means(is_lost), "mean burst": batch_means(lengths)}
    for lag in (1, 2, 5, 20):
        estimates[f"autocorrelation at lag {lag}"] = autocorrelation(is_lost, lag, rate)
    for length in (1, 2, 3, 4, 6, 8, 12, 16):
        estimates[f"share of bursts of {length}"] = batch_means((lengths == length).astype(float))
    return estimates


@pytest.mark.parametrize("name", ["burst 8", "both states lose", "states take turns"])
def test_agrees_with_a_plain_loop(name):
    process = PROCESSES[name]
    drawn = measured(process.losses(KEY).take(LOOP_PACKETS), process.loss_rate)
    looped = measured(losses_by_a_loop(process, LOOP_PACKETS, seed=1), process.loss_rate)
    for what in drawn:
        assert_same(drawn[what], looped[what], what)


def test_disagrees_with_a_loop_of_another_process():
    """Control: a loop that leaves the bad state a fifth more often, at the same loss rate, is told apart."""
    process, other = (general(p / 10, p, loss_bad=0.7, loss_good=0.02) for p in (0.1, 0.12))
    drawn = measured(process.losses(KEY).take(LOOP_PACKETS), process.loss_rate)
    looped = measured(losses_by_a_loop(other, LOOP_PACKETS, seed=1), process.loss_rate)
    assert_same(drawn["loss rate"], looped["loss rate"], "loss rate")
    for what in ("autocorrelation at lag 5", "autocorrelation at lag 20"):
        with pytest.raises(AssertionError):
            assert_same(drawn[what], looped[what], what)
