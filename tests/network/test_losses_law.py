"""What loss processes draw: against closed forms, within four standard errors, and against plain loops."""

import random

import numpy as np
import pytest
from scipy.stats import chisquare

from lossytp.network import Correlated, FourState, GilbertElliott, LossyNetwork
from tests.network.loss_statistics import (
    assert_same,
    assert_within,
    autocorrelation,
    batch_means,
    burst_lengths,
    chain,
    correlation,
    indicators,
    is_within,
    lengths_to_compare,
    longer_than,
    share_of_bursts_longer_than,
)
from tests.network.processes import (
    BERNOULLI,
    CORRELATED,
    FOUR_STATE,
    GILBERT_ELLIOTT,
    KEY,
    MARKOV,
    general,
    shared_losses,
    simple,
)

pytestmark = pytest.mark.slow

NUM_PACKETS = 10**6
both_states = pytest.mark.parametrize("name", [*FOUR_STATE, "burst 8", "both states lose", "states take turns"])


@pytest.fixture(scope="module", params=MARKOV)
def drawn(request):
    """A process, its losses, and among how many packets."""
    num_packets = 10**7 if request.param in BERNOULLI | GILBERT_ELLIOTT else NUM_PACKETS
    process = MARKOV[request.param]
    return process, process.losses(KEY).take(num_packets), num_packets


def test_loss_rate(drawn):
    process, lost, num_packets = drawn
    rate = process.loss_rate
    observed = batch_means(indicators(lost, num_packets))
    assert_within(observed, rate, "loss rate")
    assert not is_within(observed, rate + 0.1 * min(rate, 1 - rate)), "control"


def test_loss_rate_varies_as_much_as_the_correlations_say(drawn):
    """(1 + 2 * sum of the autocorrelations) times as much as independent packets': 179 times at a burst of 100.

    The variance of 100 batches is known to 14 %, so four of its standard errors are 57 %. Twice as much where two
    states that lose alike would draw their losses from one stream.
    """
    process, lost, num_packets = drawn
    if isinstance(process, FourState):
        pytest.skip("some four-state processes are periodic")
    rate = process.loss_rate
    independent = rate * (1 - rate) / num_packets
    expected = independent * (1 + 2 * sum(process.autocorrelation(lag) for lag in range(1, num_packets // 1000)))
    _, standard_error = batch_means(indicators(lost, num_packets))
    assert standard_error**2 == pytest.approx(expected, rel=0.57)


def test_burst_lengths(drawn):
    process, lost, _ = drawn
    lengths = burst_lengths(lost)
    assert_within(batch_means(lengths), process.mean_burst_packets, "mean burst")
    for packets in lengths_to_compare(lengths):
        expected = share_of_bursts_longer_than(process, packets)
        assert_within(longer_than(lengths, packets), expected, f"bursts longer than {packets}")


def test_autocorrelation(drawn):
    process, lost, num_packets = drawn
    is_lost = indicators(lost, num_packets)
    for lag in (1, 2, 5, 20, 100):
        observed = autocorrelation(is_lost, lag, process.loss_rate)
        assert_within(observed, process.autocorrelation(lag), f"lag {lag}")


@pytest.mark.parametrize("process", BERNOULLI.values(), ids=BERNOULLI)
def test_bernoulli_gaps_are_geometric(process):
    gaps = np.diff(process.losses(KEY).take(10**7))
    for packets in lengths_to_compare(gaps):
        assert_within(longer_than(gaps, packets), (1 - process.loss_rate) ** packets, f"gaps longer than {packets}")


def test_bursts_of_8_are_not_mistaken_for_another_law():
    """Control: the statistics tell a mean burst of 8 from 9, and its law from another of the same mean."""
    lengths = burst_lengths(simple(0.01, 8).losses(KEY).take(10**7))
    always_8 = np.full(len(lengths), 8)
    assert not is_within(batch_means(lengths), 9)
    assert not is_within(longer_than(lengths, 4), share_of_bursts_longer_than(simple(0.01, 9), 4))
    assert not is_within(longer_than(always_8, 4), share_of_bursts_longer_than(simple(0.01, 8), 4))


@pytest.mark.parametrize(
    "process",
    [
        general(0.1, 0.2, loss_bad=0.8, loss_good=0.1),
        *(FOUR_STATE[name] for name in ("all four states", "a loss every other packet", "a burst for ever")),
    ],
)
def test_a_link_starts_stationary(process):
    """Which of the first four packets are lost, over 5,000 links, against the matrix; a start in good would show."""
    patterns = np.zeros(16)
    for link in range(5000):
        patterns[int(indicators(process.losses((link, "test")).take(4), 4) @ [8, 4, 2, 1])] += 1
    transition, loss, stationary = chain(process)

    def fits(start):
        expected = np.zeros(16)
        for pattern in range(16):
            state = start
            for position, is_lost in enumerate(f"{pattern:04b}"):
                state = (state if position == 0 else state @ transition) * (loss if is_lost == "1" else 1 - loss)
            expected[pattern] = 5000 * state.sum()
        often = expected > 1
        observed, counted = ([*counts[often], 5000 - counts[often].sum() + 1e-9] for counts in (patterns, expected))
        return not patterns[expected == 0].any() and chisquare(observed, counted).pvalue > 1e-4

    assert fits(stationary)
    assert not fits(np.eye(len(stationary))[0])


# Against a plain loop


def losses_by_a_loop(process, num_packets, seed):
    """One packet after the other, as Linux's ``sch_netem.c`` does. Four states step before a loss, two after it."""
    generator = random.Random(seed)
    state, lost = 1, []
    for packet in range(-1000, num_packets):
        number = generator.random()
        if isinstance(process, GilbertElliott):
            is_lost = generator.random() < (process.loss_bad if state == 2 else process.loss_good)
            if number < (process.p_bad_to_good if state == 2 else process.p_good_to_bad):
                state = 3 - state
        elif state == 1:
            state = 4 if number < process.p14 else 3 if number < process.p14 + process.p13 else 1
        elif state == 2:
            state = 3 if number < process.p23 else 2
        elif state == 3:
            state = 2 if number < process.p32 else 1 if number < process.p32 + process.p31 else 3
        else:
            state = 1
        if packet >= 0 and (is_lost if isinstance(process, GilbertElliott) else state > 2):
            lost.append(packet)
    return np.array(lost)


def measured(lost, rate):
    is_lost, bursts = indicators(lost, NUM_PACKETS), burst_lengths(lost)
    gaps = np.diff(lost)[np.diff(lost) > 1] - 1
    estimates = {"loss rate": batch_means(is_lost), "mean burst": batch_means(bursts), "mean gap": batch_means(gaps)}
    for what, runs in (("bursts", bursts), ("gaps", gaps)):
        for length in (1, 2, 3, 5, 8):
            estimates[f"share of {what} of {length}"] = batch_means((runs == length).astype(float))
            after_one = (runs[:-1] == 1) & (runs[1:] == length)
            estimates[f"{what} of {length} after one of 1"] = batch_means(after_one.astype(float))
    for lag in (1, 2, 5, 20):
        estimates[f"autocorrelation at lag {lag}"] = autocorrelation(is_lost, lag, rate)
    return estimates


@both_states
def test_agrees_with_the_kernel_s_loop(name):
    """In what hangs on the order of states too: which lengths of runs and of gaps follow each other."""
    process = MARKOV[name]
    ours = measured(process.losses(KEY).take(NUM_PACKETS), process.loss_rate)
    looped = measured(losses_by_a_loop(process, NUM_PACKETS, seed=1), process.loss_rate)
    for what in ours:
        assert_same(ours[what], looped[what], what)


@pytest.mark.parametrize(
    ("process", "other", "told_apart"),
    [
        (general(0.01, 0.1, 0.7, 0.02), general(0.012, 0.12, 0.7, 0.02), "autocorrelation at lag 5"),
        (FourState(0.02, 0.2, 0.1, 0.3, 0.01), FourState(0.02, 0.25, 0.05, 0.0789, 0.00667), "share of gaps of 1"),
    ],
)
def test_disagrees_with_the_loop_of_another_process(process, other, told_apart):
    """Control: sojourns a sixth shorter; and bursts with fewer and longer pauses."""
    ours = measured(process.losses(KEY).take(NUM_PACKETS), process.loss_rate)
    looped = measured(losses_by_a_loop(other, NUM_PACKETS, seed=1), process.loss_rate)
    with pytest.raises(AssertionError):
        assert_same(ours[told_apart], looped[told_apart], told_apart)


# What the links of a switch share


@pytest.mark.parametrize("process", CORRELATED.values(), ids=CORRELATED)
def test_two_links_lose_together_what_the_closed_form_says(process):
    """At equal packets; and a burst of the switch shows on the other link a packet later, too."""
    network = LossyNetwork(process, seed=3)
    one, other = (indicators(network.lost_packets(*link, NUM_PACKETS), NUM_PACKETS) for link in ((0, 1), (2, 1)))
    common, private = process.common, process.private
    both = common.loss_rate + (1 - common.loss_rate) * private.loss_rate**2
    assert_within(batch_means(one * other), both, "both lost")
    later = common.autocorrelation(1) * common.loss_rate * (1 - common.loss_rate) * (1 - private.loss_rate) ** 2
    later /= process.loss_rate * (1 - process.loss_rate)
    assert_within(correlation(one[1:], other[:-1], process.loss_rate), later, "one later")


@pytest.mark.parametrize(
    "apart",
    [({"seed": 1}, {"seed": 2}), ({"group": "tp"}, {"group": "dp"}), ({"switch": "left"}, {"switch": "right"})],
    ids=["seeds", "groups", "switches"],
)
def test_other_seeds_groups_and_switches_have_nothing_in_common(apart):
    def lost(*, seed=0, group="tp", switch=0, src=0):
        network = LossyNetwork(shared_losses(0.1, 1, 4, switch), seed=seed)
        return indicators(network.lost_packets(src, 1, 200_000, group=group), 200_000)

    one, other = apart
    assert_within(correlation(lost(**one), lost(**other, src=2), 0.1), 0, "correlation")
    assert np.array_equal(lost(**one), lost(**one, src=2))  # control: all is shared among links of one switch


def test_links_share_losses_at_the_same_number_of_packets_in_one_switch_and_evaluation():
    shared, private = shared_losses(0.1, 1, 4), shared_losses(0.1, 0, 4)
    network = LossyNetwork({(0, 1): shared, (2, 1): shared}, default=private)
    one, same, other = (network.lost_packets(*link, 10_000).tolist() for link in ((0, 1), (2, 1), (1, 0)))
    assert one == same != other
    with network.evaluation(1):
        again, there = (network.lost_packets(*link, 10_000).tolist() for link in ((0, 1), (2, 1)))
    assert again == there != one


def test_switches_below_a_switch_share_their_losses():
    rack = Correlated(common=shared_losses(0.3, 1).common, private=shared_losses(0, 0), switch="rack")
    network = LossyNetwork(Correlated(common=shared_losses(0, 0), private=rack, switch="spine"))
    lost = [network.lost_packets(*link, 1000).tolist() for link in ((0, 1), (0, 2), (1, 2))]
    assert lost[0] == lost[1] == lost[2] != []
