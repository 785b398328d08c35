"""Collectives' times: closed forms without loss, tails, and 1,024 ranks."""

import time

import numpy as np
import pytest

from lossytp.network import timing
from lossytp.network.losses import Bernoulli, GilbertElliott
from lossytp.network.routes import ALGORITHMS
from lossytp.network.timing import (
    AllReduce,
    BestEffort,
    Channel,
    Deliveries,
    GoBackN,
    Path,
    SelectiveRepeat,
    collective_times,
    step_seconds,
    tail,
)
from lossytp.network.traces import Correlated

SCHEDULES = {name: algorithm.schedule for name, algorithm in ALGORITHMS.items()}
PATH = Path(bandwidth_bits_per_s=10e9, round_trip_s=20e-6)
RELIABLE = SelectiveRepeat(window_packets=64, timeout_s=100e-6)
ALPHA_S, BETA_S = 10e-6, 1.2e-6  # half a round trip, and a packet of 1,500 bytes on the wire
ELEMENTS_PER_PACKET = 364


def times(algorithm="ring", **changes):
    arguments = {
        "num_elements": 40 * ELEMENTS_PER_PACKET,
        "itemsize": 4,
        "ranks": 4,
        "path": PATH,
        "transport": RELIABLE,
        "process": Bernoulli(loss_rate=0.01),
        "samples": 500,
    }
    given = {"algorithm": algorithm, **arguments, **changes}
    all_reduce = AllReduce(**{name: given.pop(name) for name in ("algorithm", "num_elements", "itemsize", "ranks")})
    channel = Channel(**{name: given.pop(name) for name in ("path", "transport", "process")})
    return collective_times(all_reduce, channel, **given)


# 4 chunks of 10 packets, or 40 packets as a whole; 5 ranks' chunks are of 8 packets. Ranks 3 and 4 of a tree
# of 5 are two links from its root
LOSSLESS_S = {
    ("sender", 4): ALPHA_S + 40 * BETA_S,
    ("direct", 4): 2 * (ALPHA_S + 3 * 10 * BETA_S),
    ("ring", 4): 6 * (ALPHA_S + 10 * BETA_S),
    ("tree", 4): 4 * (ALPHA_S + 40 * BETA_S),
    ("switch", 4): 2 * (ALPHA_S + 40 * BETA_S),
    ("direct", 5): 2 * (ALPHA_S + 4 * 8 * BETA_S),
    ("ring", 5): 8 * (ALPHA_S + 8 * BETA_S),
    ("tree", 5): 4 * (ALPHA_S + 40 * BETA_S),
    ("tree", 8): 6 * (ALPHA_S + 40 * BETA_S),
}


@pytest.mark.parametrize(("algorithm", "ranks"), LOSSLESS_S)
@pytest.mark.parametrize("transport", [RELIABLE, GoBackN(window_packets=64, timeout_s=1), BestEffort(deadline_s=1)])
def test_without_loss_an_all_reduce_takes_what_the_alpha_beta_model_says(algorithm, ranks, transport):
    lossless = times(algorithm, ranks=ranks, transport=transport, process=Bernoulli(loss_rate=0), samples=3)
    assert lossless.seconds == pytest.approx(np.full(3, LOSSLESS_S[algorithm, ranks]), rel=1e-9)
    assert (lossless.missing_share == 0).all()


class Labels:
    """A transport whose message m on link row r takes 1000 r + m seconds and misses m packets."""

    def deliver(self, losses, num_packets, num_messages, path):
        rows, messages = np.mgrid[: len(losses), :num_messages]
        return Deliveries(1000.0 * rows + messages, messages)


def test_each_sample_is_made_of_its_own_links_and_messages(monkeypatch):
    """Two ranks, direct: links 2 run and 2 run + 1; a run's collective c has messages 2 c and 2 c + 1."""
    monkeypatch.setattr(timing, "LINKS_AT_ONCE", 4)  # two runs
    got = times("direct", ranks=2, transport=Labels(), samples=5)
    slower_link = np.array([1000, 1000, 1000, 3000, 3000])
    first_message = np.array([0, 2, 4, 0, 2])
    assert got.seconds.tolist() == (2 * slower_link + 2 * first_message + 1).tolist()
    assert got.missing_share == pytest.approx((4 * first_message + 2) / (2 * 2 * 20))


@pytest.mark.parametrize(("transport", "losses_a_packet"), [(RELIABLE, 9), (BestEffort(deadline_s=1), 0.9)])
def test_a_portion_has_room_for_what_is_sent_again_and_lost_again(transport, losses_a_packet, monkeypatch):
    monkeypatch.setattr(timing, "LOSSES_AT_ONCE", 4000)
    portions = []

    class Noted(type(transport)):
        def deliver(self, losses, num_packets, num_messages, path):
            portions.append(len(losses) * num_messages * (1 + num_packets * losses_a_packet))
            return Labels().deliver(losses, num_packets, num_messages, path)

    noted = Noted(**vars(transport))
    times("ring", transport=noted, process=Bernoulli(loss_rate=0.9), samples=6)
    assert 1000 < max(portions) <= 4000


def test_an_all_reduce_of_the_earlier_studies_is_as_slow_as_its_slowest_message():
    """P(no loss on any of 3 links of 40 packets); each loss-free collective takes the lossless time."""
    got = times("sender", ranks=3, samples=20_000).seconds
    share = (got < ALPHA_S + 40 * BETA_S + 1e-12).mean()
    expected = 0.99 ** (3 * 40)
    assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / len(got))
    assert abs(share - 0.99**40) > 0.1


@pytest.mark.parametrize("algorithm", SCHEDULES)
@pytest.mark.parametrize("transport", [RELIABLE, GoBackN(window_packets=64, timeout_s=100e-6)])
def test_time_grows_with_the_loss_rate_and_never_falls_below_the_lossless_one(algorithm, transport):
    rates = (0.0, 0.001, 0.01, 0.1)
    by_rate = [times(algorithm, transport=transport, process=Bernoulli(loss_rate=rate)).seconds for rate in rates]
    means = [seconds.mean() for seconds in by_rate]
    assert means == sorted(means)
    assert means[-1] > 1.5 * means[0]
    assert min(seconds.min() for seconds in by_rate) >= LOSSLESS_S[algorithm, 4] * (1 - 1e-9)


def test_bursts_spare_most_messages_and_lengthen_the_tail():
    burst = GilbertElliott.from_loss_and_burst(loss_rate=0.01, mean_burst_packets=20)
    rare, often = times(process=burst, samples=4000).seconds, times(samples=4000).seconds
    assert rare.mean() < often.mean()
    assert tail(rare).p999_s > 1.5 * tail(often).p999_s


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_best_effort_misses_the_loss_rate_and_is_done_by_its_deadlines(algorithm):
    deadline_s = 200e-6
    got = times(algorithm, transport=BestEffort(deadline_s=deadline_s), samples=4000)
    assert got.missing_share.mean() == pytest.approx(0.01, rel=0.1)
    messages_in_a_row = round(LOSSLESS_S[algorithm, 4] / (ALPHA_S + 10 * BETA_S))
    assert got.seconds.max() <= max(messages_in_a_row, 1) * deadline_s
    assert tail(got.seconds).p999_s > LOSSLESS_S[algorithm, 4]


def test_best_effort_goes_on_where_nothing_arrives():
    got = times("ring", transport=BestEffort(deadline_s=1), process=Bernoulli(loss_rate=1), samples=2)
    assert got.seconds.tolist() == [6, 6]
    assert got.missing_share.tolist() == [1, 1]


def test_samples_in_several_portions_are_as_many_and_as_slow(monkeypatch):
    whole = times(samples=4000).seconds
    monkeypatch.setattr(timing, "LOSSES_AT_ONCE", 20_000)
    portions = times(samples=4000).seconds
    assert len(portions) == 4000
    assert len(np.unique(portions)) > 0.5 * len(np.unique(whole))
    assert (portions != whole).any()
    standard_error = np.sqrt((portions.var() + whole.var()) / 4000)
    assert abs(portions.mean() - whole.mean()) < 4 * standard_error


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_1024_ranks(algorithm):
    """Of a message of 8 MB, and within seconds; the slowest of many links takes longer than of few."""
    start = time.perf_counter()
    many = times(algorithm, ranks=1024, num_elements=2 * 2**20, samples=2).seconds
    assert time.perf_counter() - start < 30
    lossless = times(algorithm, ranks=1024, num_elements=2 * 2**20, samples=1, process=Bernoulli(loss_rate=0)).seconds
    assert (many > 1.05 * lossless).all()
    few = times(algorithm, ranks=2, num_elements=2 * 2**20, samples=20).seconds
    few_lossless = times(algorithm, ranks=2, num_elements=2 * 2**20, samples=1, process=Bernoulli(loss_rate=0)).seconds
    assert (many - lossless).mean() > (few - few_lossless).mean()


STEP = {"num_layers": 3, "compute_s": 0.5, "samples": 1}


def step(loss_rate, **changes):
    all_reduce = AllReduce(algorithm="ring", num_elements=91 * 64, itemsize=4, ranks=4)  # 16 packets
    channel = Channel(path=PATH, transport=RELIABLE, process=Bernoulli(loss_rate=loss_rate))
    return step_seconds(all_reduce, channel, **(STEP | changes))


def test_a_step_is_its_computation_and_four_all_reduces_a_layer():
    lossless = step(0, samples=2)
    assert lossless == pytest.approx(np.full(2, 0.5 + 12 * 6 * (ALPHA_S + 4 * BETA_S)), rel=1e-9)
    lossy = step(0.01, samples=5)
    collectives = times("ring", num_elements=91 * 64, samples=60).seconds
    assert lossy == pytest.approx(0.5 + collectives.reshape(5, 12).sum(axis=1))


def test_runs_are_independent_also_where_a_switchs_links_share_their_losses():
    shared = Correlated.from_loss_and_share(loss_rate=0.05, shared=1.0)
    for process in (shared, Bernoulli(loss_rate=0.05)):
        missing = times(transport=BestEffort(deadline_s=1.0), process=process, samples=400).missing_share
        assert len(np.unique(missing)) > 5


def test_one_rank_talks_to_nobody_and_the_tail_is_of_the_sample():
    assert {algorithm for algorithm, _ in LOSSLESS_S} == set(SCHEDULES)
    assert times(ranks=1).seconds.tolist() == [0] * 500
    assert tail(np.arange(10_001.0)) == (5000, 5000, 9900, 9990)
    assert (times().seconds == times().seconds).all()
    assert (times(seed=1).seconds != times().seconds).any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("algorithm", "mesh"), ("ranks", 0), ("samples", 0), ("num_elements", 1.5), ("itemsize", 0)),
        ("loss_rate", Bernoulli(loss_rate=1)),
        ("timeout_s", SelectiveRepeat(window_packets=4, timeout_s=21e-6)),
        ("deadline_s", BestEffort(deadline_s=11e-6)),
    ],
)
def test_collectives_that_cannot_be_are_refused(name, value):
    argument = {"loss_rate": "process", "timeout_s": "transport", "deadline_s": "transport"}.get(name, name)
    with pytest.raises(ValueError, match=name):
        times(**{argument: value})


def test_steps_and_algorithms_that_cannot_be_timed_are_refused(monkeypatch):
    for name, value in (("num_layers", 0), ("compute_s", -1)):
        with pytest.raises(ValueError, match=name):
            step(0, **{name: value})
    monkeypatch.setitem(ALGORITHMS, "mesh", ALGORITHMS["direct"]._replace(schedule=None))
    with pytest.raises(ValueError, match="algorithm"):
        times("mesh")
