"""Messages over lossy links, against a packet-by-packet event simulation and against closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.losses import Bernoulli, GilbertElliott
from lossytp.network.routes import Wire
from lossytp.network.timing import BestEffort, GoBackN, Path, SelectiveRepeat, selective_repeat
from tests.network.event_simulation import BestEffortEvents, GoBackNEvents, SelectiveRepeatEvents
from tests.network.loss_statistics import assert_within, batch_means, indicators, is_within, reproducible

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


@pytest.mark.parametrize("transport", EVENTS)
def test_more_packets_are_drawn_where_the_first_guess_is_too_few(transport):
    lost = np.zeros(400, dtype=bool)
    lost[[3, *range(60, 300)]] = True  # the 64 packets of the message itself hold few of the losses it will meet
    assert_same_as_events(transport(window_packets=8, timeout_s=16 * PACKET_S), [Recorded(lost)], 64, 1, path(5))


@pytest.mark.parametrize("rate", [0.9, 0.95])
def test_where_most_is_lost_a_few_rounds_draw_enough(rate, monkeypatch):
    """Each round starts again from the first packet."""
    rounds = []
    counted = staticmethod(lambda *given, **named: rounds.append(1) or selective_repeat(*given, **named))
    monkeypatch.setattr(SelectiveRepeat, "starts", counted)
    links = [Bernoulli(loss_rate=rate).losses((0, "test", link)) for link in range(4)]
    SelectiveRepeat(window_packets=24, timeout_s=16 * PACKET_S).deliver(links, 64, 4, path(10))
    assert len(rounds) < 8


def test_a_retransmission_that_is_due_does_not_wait_for_an_acknowledgement():
    """Packets 0 and 7 are due at 15 and 22; the window opens at 22.5, when packet 0's repetition is acknowledged."""
    sender = SelectiveRepeat(window_packets=8, timeout_s=15 * PACKET_S)
    delivered = sender.deliver([Recorded([1, 0, 0, 0, 0, 0, 0, 1])], 10, 1, path(6.5))
    # 7 again at 22, 8 at 23, 9 at 24; arrival 1 + 3.25 later
    assert delivered.seconds[0, 0] == pytest.approx((24 + 1 + 3.25) * PACKET_S, rel=1e-12)
    assert_same_as_events(sender, [Recorded([1, 0, 0, 0, 0, 0, 0, 1])], 10, 1, path(6.5))


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


@pytest.mark.parametrize("process", PROCESSES)
def test_selective_repeat_sends_each_packet_one_over_one_minus_p_times(process):
    lost = [PROCESSES[process].losses((0, "test", link)).take(2 * 200 * 50) for link in range(100)]
    _, sent = selective_repeat(lost, 200, 50, window=64, timeout=32, acknowledged=11)
    assert sent.max() <= 2 * 200 * 50
    transmissions = batch_means(sent / (200 * 50))
    rate = PROCESSES[process].loss_rate
    assert_within(transmissions, 1 / (1 - rate), "transmissions a packet")
    assert not is_within(transmissions, 1 + rate)


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


def test_go_back_n_is_slower_than_selective_repeat_and_the_larger_window_is_faster():
    """At each message of the same losses' statistics; a window of twice the round trip rides over a timeout."""

    def mean(transport, window):
        losses = [Bernoulli(loss_rate=0.01).losses((0, "test", link)) for link in range(20)]
        sender = transport(window_packets=window, timeout_s=40 * PACKET_S)
        return sender.deliver(losses, 500, 20, path(19)).seconds.mean()

    assert mean(SelectiveRepeat, 80) < mean(SelectiveRepeat, 20) < mean(SelectiveRepeat, 10)
    assert mean(SelectiveRepeat, 80) < 0.8 * mean(GoBackN, 80)


def test_a_sender_that_is_not_paced_is_sooner_by_what_the_docstring_says():
    """Windows that cover the round trip need no pacing; of a quarter of it, bursts end 0 to 15 % sooner."""
    transport, on = SelectiveRepeat(window_packets=8, timeout_s=64 * PACKET_S), path(31)
    links = recorded(Bernoulli(loss_rate=0.01), links=1, num_packets=12_000)
    paced = transport.deliver(links, 200, 40, on).seconds[0]
    packets = links[0].packets()
    burst = np.array(
        [
            SelectiveRepeatEvents(
                packets,
                200,
                on.packet_s,
                on.round_trip_s,
                window=8,
                timeout_s=transport.timeout_s,
                paced=False,
            ).run()
            for _ in range(40)
        ]
    )
    assert (burst < paced).all()  # the same losses, for the same packets
    assert 1.01 < paced.mean() / burst.mean() < 1.15
    lossless = transport.deliver([Recorded(np.zeros(0))], 200, 1, on).seconds[0, 0]
    assert 0 < lossless - burst.min() < on.round_trip_s


def test_a_generous_deadline_misses_what_is_lost_and_a_short_one_what_the_bandwidth_cannot_carry():
    process = PROCESSES["gilbert_elliott"]
    on = path(10)

    def missing_share(deadline: float) -> tuple[float, float]:
        losses = [process.losses((0, "test", link)) for link in range(100)]
        missing = BestEffort(deadline_s=deadline * PACKET_S).deliver(losses, 200, 100, on).missing_packets
        return batch_means(missing.mean(axis=1) / 200)

    assert_within(missing_share(1000), process.loss_rate, "generous")
    assert_within(missing_share(5 + 50), 1 - 0.25 * (1 - process.loss_rate), "a quarter arrives in time")
    assert not is_within(missing_share(5 + 50), 0.75)


def test_a_path_and_transports_know_their_times_and_bounds():
    on = Path(bandwidth_bits_per_s=1e9, round_trip_s=1e-3, wire=Wire(mtu_bytes=9000))
    assert on.packet_s == pytest.approx(72e-6)
    assert on.arrival_s == pytest.approx(572e-6)
    assert SelectiveRepeat(window_packets=4, timeout_s=1).gap_s(on) == pytest.approx(1072e-6 / 4)
    for kind, name, value in (
        *((Path, "bandwidth_bits_per_s", value) for value in (0, math.inf)),
        (Path, "round_trip_s", -1),
        *((SelectiveRepeat, "window_packets", value) for value in (0, 2.5)),
        (GoBackN, "timeout_s", math.nan),
        (BestEffort, "deadline_s", -1),
    ):
        valid = {"bandwidth_bits_per_s": 1, "round_trip_s": 0, "window_packets": 2, "timeout_s": 1, "deadline_s": 1}
        with pytest.raises(ValueError, match=name):
            kind(**{each: valid[each] for each in kind.__dataclass_fields__ if each in valid} | {name: value})
