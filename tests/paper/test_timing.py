"""Times of messages, against a packet-by-packet event simulation and closed forms, and of collectives and steps."""

import math

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.losses import Bernoulli, GilbertElliott
from lossytp.network.routes import Wire
from lossytp.network.traces import Correlated
from paper import timing
from paper.timing import (
    SCHEDULES,
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
from tests.network.loss_statistics import assert_within, batch_means, indicators, is_within, reproducible
from tests.paper.event_simulation import BestEffortEvents, GoBackNEvents, SelectiveRepeatEvents

pytestmark = pytest.mark.slow

# Messages

PACKET_S = 2.0**-16
EVENTS = {SelectiveRepeat: SelectiveRepeatEvents, GoBackN: GoBackNEvents}
PROCESSES = {
    "bernoulli": Bernoulli(loss_rate=0.1),
    "gilbert_elliott": GilbertElliott.from_loss_and_burst(loss_rate=0.1, mean_burst_packets=6),
    "noisy_states": GilbertElliott(p_good_to_bad=0.05, p_bad_to_good=0.2, loss_bad=0.7, loss_good=0.02),
}
# window_packets, round trip and timeout in packets' times on the wire; dyadic ones let events coincide
SETTINGS = {
    "window above the round trip": (24, 11.37, 31.91),
    "window of the whole message": (64, 11.37, 31.91),
    "window of one round trip": (16, 15, 32),
    "paced by the window": (8, 27.3, 61.7),
    "shortest timeout": (16, 15, 16),
    "stop and wait": (1, 3.7, 9.1),
    "no round trip": (4, 0, 1),
}


class Recorded:
    """A link that loses the packets marked in `lost`, and none after them."""

    def __init__(self, lost: np.ndarray) -> None:
        self.lost, self.taken = np.asarray(lost, dtype=bool), 0

    def take(self, num_packets: int) -> np.ndarray:
        self.taken += num_packets
        return np.flatnonzero(self.lost[self.taken - num_packets : self.taken])

    def packets(self):
        """For each packet in turn whether it is lost."""
        yield from self.lost.tolist()
        while True:
            yield False


def path(round_trip_packets: float = 10, packet_s: float = PACKET_S) -> Path:
    wire = Wire()
    return Path(
        bandwidth_bits_per_s=8 * wire.mtu_bytes / packet_s, round_trip_s=round_trip_packets * packet_s, wire=wire
    )


def recorded(process, links: int, num_packets: int) -> list[Recorded]:
    return [
        Recorded(indicators(process.losses((0, "test", link)).take(num_packets), num_packets)) for link in range(links)
    ]


def assert_same_as_events(transport, links: list[Recorded], num_packets: int, num_messages: int, on: Path) -> None:
    delivered = transport.deliver(links, num_packets, num_messages, on)
    assert (delivered.missing_packets == 0).all()
    for link, seconds in zip(links, delivered.seconds, strict=True):
        packets = link.packets()
        for second in seconds:
            simulated = EVENTS[type(transport)](
                packets,
                num_packets,
                on.packet_s,
                on.round_trip_s,
                window=transport.window_packets,
                timeout_s=transport.timeout_s,
            )
            assert second == pytest.approx(simulated.run(), rel=0, abs=1e-9)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("transport", EVENTS)
def test_reliable_transports_take_exactly_as_long_as_in_the_event_simulation(transport, process, setting):
    window, round_trip, timeout = SETTINGS[setting]
    links = recorded(PROCESSES[process], links=3, num_packets=20_000)
    assert_same_as_events(
        transport(window_packets=window, timeout_s=timeout * PACKET_S), links, 48, 3, path(round_trip)
    )


@pytest.mark.parametrize("transport", EVENTS)
@reproducible
@given(
    lost=st.lists(st.booleans(), max_size=40),
    num_packets=st.integers(1, 12),
    window=st.sampled_from([1, 2, 4, 8, 16]),
    round_trip=st.sampled_from([0, 1, 3, 6.5, 7]),
    timeouts=st.sampled_from([1, 1.25, 2, 3]),
)
def test_any_pattern_of_losses_takes_as_long_as_in_the_event_simulation(
    transport, lost, num_packets, window, round_trip, timeouts
):
    """Also those where the first packets drawn hold no loss and later ones all are lost, and where events coincide."""
    sender = transport(window_packets=window, timeout_s=timeouts * (round_trip + 1) * PACKET_S)
    assert_same_as_events(sender, [Recorded(lost), Recorded(lost[::-1])], num_packets, 2, path(round_trip))


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("deadline", [11.5, 30.2, 53.9, 54, 70])  # in packets; all 48 have arrived after 54
def test_best_effort_ends_and_misses_exactly_what_it_does_in_the_event_simulation(process, deadline):
    links = recorded(PROCESSES[process], links=4, num_packets=48 * 5)
    on = path(12)
    delivered = BestEffort(deadline_s=deadline * PACKET_S).deliver(links, 48, 5, on)
    for link, seconds, missing in zip(links, delivered.seconds, delivered.missing_packets, strict=True):
        packets = link.packets()
        for second, lacking in zip(seconds, missing, strict=True):
            simulated = BestEffortEvents(packets, 48, on.packet_s, on.round_trip_s, deadline_s=deadline * PACKET_S)
            assert second == pytest.approx(simulated.run(), rel=0, abs=1e-12)
            simulated.env.run()  # the rest of the message, which nobody waits for, still crosses the link
            assert lacking == 48 - len(simulated.received)


@pytest.mark.parametrize(("window", "gap"), [(1, 11), (4, 2.75), (11, 1), (200, 1)])
@pytest.mark.parametrize("transport", EVENTS)
def test_without_loss_a_message_is_a_pipeline(transport, window, gap):
    """A round trip of 10 packets and a packet on the wire: 11 packets' times until an acknowledgement."""
    sender = transport(window_packets=window, timeout_s=20 * PACKET_S)
    delivered = sender.deliver([Recorded(np.zeros(0))], 100, 3, path(10))
    assert delivered.seconds == pytest.approx(np.full((1, 3), (99 * gap + 1 + 5) * PACKET_S), rel=1e-12)


@pytest.mark.parametrize("transport", EVENTS)
def test_stop_and_wait_takes_its_closed_form(transport):
    """Every packet a round trip, and a timeout for each of its p / (1 - p) losses (Bertsekas and Gallager, 2.4.1)."""
    losses = [Bernoulli(loss_rate=0.2).losses((0, "test", link)) for link in range(100)]
    delivered = transport(window_packets=1, timeout_s=37.5 * PACKET_S).deliver(losses, 20, 200, path(10))
    expected = (19 * 11 + 1 + 5 + 20 * 0.25 * 37.5) * PACKET_S
    assert_within(batch_means(delivered.seconds.ravel()), expected, "stop and wait")
    assert not is_within(batch_means(delivered.seconds.ravel()), expected * 1.02)


def test_go_back_n_takes_its_closed_form():
    """A loss costs what is sent in vain until its timeout, here of 24 packets, and every packet has p / (1 - p)."""
    losses = [Bernoulli(loss_rate=0.02).losses((0, "test", link)) for link in range(100)]
    delivered = GoBackN(window_packets=64, timeout_s=24 * PACKET_S).deliver(losses, 100, 200, path(10))
    expected = (99 + 1 + 5 + 100 * 0.02 / 0.98 * 24) * PACKET_S
    assert_within(batch_means(delivered.seconds.ravel()), expected, "go-back-N")
    assert not is_within(batch_means(delivered.seconds.ravel()), expected * 1.02)


def test_a_path_and_transports_know_their_times_and_bounds():
    on = Path(bandwidth_bits_per_s=1e9, round_trip_s=1e-3, wire=Wire(mtu_bytes=9000))
    assert on.packet_s == pytest.approx(72e-6)
    assert on.arrival_s == pytest.approx(572e-6)
    assert SelectiveRepeat(window_packets=4, timeout_s=1).gap_s(on) == pytest.approx(1072e-6 / 4)
    for kind, name, value in (
        *((Path, "bandwidth_bits_per_s", value) for value in (0, math.inf)),
        (Path, "round_trip_s", -1),
        (Path, "round_trip_s", float("inf")),
        *((SelectiveRepeat, "window_packets", value) for value in (0, 2.5)),
        (GoBackN, "timeout_s", math.nan),
        (BestEffort, "deadline_s", -1),
    ):
        valid = {"bandwidth_bits_per_s": 1, "round_trip_s": 0, "window_packets": 2, "timeout_s": 1, "deadline_s": 1}
        with pytest.raises(ValueError, match=name):
            kind(**{each: valid[each] for each in kind.__dataclass_fields__ if each in valid} | {name: value})


# Collectives and steps


PATH = Path(bandwidth_bits_per_s=10e9, round_trip_s=20e-6)
RELIABLE = SelectiveRepeat(window_packets=64, timeout_s=100e-6)
ALPHA_S, BETA_S = 10e-6, 1.2e-6  # half a round trip, and a packet of 1,500 bytes on the wire
ELEMENTS_PER_PACKET = 364
PERCENT = Bernoulli(loss_rate=0.01)


def times(
    algorithm="ring", *, ranks=4, num_elements=40 * ELEMENTS_PER_PACKET, itemsize=4,
    transport=RELIABLE, process=PERCENT, **settings,
):  # fmt: skip
    all_reduce = AllReduce(algorithm=algorithm, num_elements=num_elements, itemsize=itemsize, ranks=ranks)
    channel = Channel(path=PATH, transport=transport, process=process)
    return collective_times(all_reduce, channel, **({"samples": 500} | settings))


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


# Schedules


def ring_events(seconds: np.ndarray) -> float:
    """Each rank forwards message k + 1 once it has message k of its predecessor and its own message k is through."""
    messages, ranks = seconds.shape
    env = simpy.Environment()
    arrived = [[env.event() for _ in range(messages)] for _ in range(ranks)]  # of rank r's message k at its successor

    def rank(r):
        for k in range(messages):
            if k:
                yield arrived[r - 1][k - 1]
            yield env.timeout(seconds[k, r])
            arrived[r][k].succeed()

    for r in range(ranks):
        env.process(rank(r))
    env.run()
    return env.now


def tree_events(up: dict[int, float], down: dict[int, float], ranks: int) -> float:
    """A rank's children are twice its number and one, and two, more; it hears both, and answers both at once."""
    env = simpy.Environment()
    summed, told = [env.event() for _ in range(ranks)], [env.event() for _ in range(ranks)]
    last = []

    def children(r):
        return [child for child in (2 * r + 1, 2 * r + 2) if child < ranks]

    def rank(r):
        for child in children(r):
            yield summed[child]
        if r:
            yield env.timeout(up[r])
        summed[r].succeed()
        if r:
            yield told[(r - 1) // 2]
            yield env.timeout(down[r])
        else:
            yield env.all_of(summed)
        told[r].succeed()
        last.append(env.now)

    for r in range(ranks):
        env.process(rank(r))
    env.run()
    return max(last)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16])
def test_ring_and_tree_wait_for_each_other_as_in_an_event_simulation(ranks):
    draws = np.random.Generator(np.random.Philox(0))
    ring = draws.exponential(size=(2 * (ranks - 1), 3, ranks))
    expected = [ring_events(ring[:, sample]) for sample in range(3)]
    assert SCHEDULES["ring"].complete(ring) == pytest.approx(np.array(expected))
    tree = draws.exponential(size=(1, 3, 2 * (ranks - 1)))
    halves = [np.split(tree[0, sample], 2) for sample in range(3)]
    expected = [tree_events(dict(enumerate(up, 1)), dict(enumerate(down, 1)), ranks) for up, down in halves]
    assert SCHEDULES["tree"].complete(tree) == pytest.approx(np.array(expected))


def test_direct_and_switch_wait_for_the_slowest_rank_between_their_two_phases():
    assert SCHEDULES["direct"].complete(np.array([[[1.0, 2, 3]], [[5, 4, 1]]])).tolist() == [3 + 5]
    assert SCHEDULES["switch"].complete(np.array([[[1.0, 2, 3, 5, 4, 1]]])).tolist() == [3 + 5]
