"""The law of netem's four-state losses: over a million packets against closed forms and the kernel's loop."""

import random

import numpy as np
import pytest
from scipy.stats import chisquare

from lossytp.network import FourState
from tests.network.four_state_processes import KEY, PROCESSES
from tests.network.loss_statistics import (
    assert_closed_forms_hold,
    assert_same,
    autocorrelation,
    batch_means,
    burst_lengths,
    chain,
    indicators,
    is_within,
)

NUM_PACKETS = 10**6
varying = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)


# The law of what is drawn


@varying
def test_closed_forms_hold_over_a_million_packets(process):
    lost = process.losses(KEY).take(NUM_PACKETS)
    assert_closed_forms_hold(process, lost, NUM_PACKETS)
    assert not is_within(batch_means(indicators(lost, NUM_PACKETS)), 1.1 * process.loss_rate)


def losses_by_the_kernels_loop(process, num_packets, seed):
    """One packet after the other from state 1 on: the chain steps, then its new state decides the loss."""
    generator = random.Random(seed)
    state, lost = 1, []
    for packet in range(-1000, num_packets):
        number = generator.random()
        if state == 1:
            state = 4 if number < process.p14 else 3 if number < process.p14 + process.p13 else 1
        elif state == 2:
            state = 3 if number < process.p23 else 2
        elif state == 3:
            state = 2 if number < process.p32 else 1 if number < process.p32 + process.p31 else 3
        else:
            state = 1
        if state > 2 and packet >= 0:
            lost.append(packet)
    return np.array(lost)


def measured(lost, rate):
    is_lost, bursts = indicators(lost, NUM_PACKETS), burst_lengths(lost)
    gaps = np.diff(lost)[np.diff(lost) > 1] - 1
    estimates = {"loss rate": batch_means(is_lost), "mean burst": batch_means(bursts), "mean gap": batch_means(gaps)}
    for length in (1, 2, 3, 5, 8):
        estimates[f"share of bursts of {length}"] = batch_means((bursts == length).astype(float))
        estimates[f"share of gaps of {length}"] = batch_means((gaps == length).astype(float))
        estimates[f"bursts of {length} after one of 1"] = batch_means(
            ((bursts[:-1] == 1) & (bursts[1:] == length)) * 1.0
        )
        estimates[f"gaps of {length} after one of 1"] = batch_means(((gaps[:-1] == 1) & (gaps[1:] == length)) * 1.0)
    for lag in (1, 2, 5, 20):
        estimates[f"autocorrelation at lag {lag}"] = autocorrelation(is_lost, lag, rate)
    return estimates


@varying
def test_agrees_with_the_kernels_loop(process):
    """In what hangs on the order of states too: which lengths of runs and of gaps follow each other."""
    drawn = measured(process.losses(KEY).take(NUM_PACKETS), process.loss_rate)
    looped = measured(losses_by_the_kernels_loop(process, NUM_PACKETS, seed=1), process.loss_rate)
    for what in drawn:
        assert_same(drawn[what], looped[what], what)


def test_disagrees_with_the_loop_of_another_process():
    """Control: the same stationary rate and mean burst, but bursts with fewer and longer pauses."""
    process, other = FourState(0.02, 0.2, 0.1, 0.3, 0.01), FourState(0.02, 0.25, 0.05, 0.0789, 0.00667)
    drawn = measured(process.losses(KEY).take(NUM_PACKETS), process.loss_rate)
    looped = measured(losses_by_the_kernels_loop(other, NUM_PACKETS, seed=1), process.loss_rate)
    with pytest.raises(AssertionError):
        assert_same(drawn["share of gaps of 1"], looped["share of gaps of 1"], "gaps")


@pytest.mark.parametrize("name", ["all four states", "a loss every other packet", "a burst for ever"])
def test_a_link_starts_stationary(name):
    """Which of the first four packets are lost, over 5,000 links, against the matrix; a start in state 1 would show."""
    process = PROCESSES[name]
    patterns = np.zeros(16)
    for link in range(5000):
        patterns[int(indicators(process.losses((link, "test")).take(4), 4) @ [8, 4, 2, 1])] += 1
    transition, loss, stationary = chain(process)

    def expected(start):
        shares = np.zeros(16)
        for pattern in range(16):
            state = start
            for position, is_lost in enumerate(f"{pattern:04b}"):
                state = (state if position == 0 else state @ transition) * (loss if is_lost == "1" else 1 - loss)
            shares[pattern] = state.sum()
        return shares * 5000

    def fits(start):
        some = expected(start) > 1
        return (
            not patterns[expected(start) == 0].any()
            and chisquare(
                [*patterns[some], 5000 - patterns[some].sum() + 1e-9],
                [*expected(start)[some], 5000 - expected(start)[some].sum() + 1e-9],
            ).pvalue
            > 1e-4
        )

    assert fits(stationary)
    assert not fits(np.array([1.0, 0, 0, 0]))
