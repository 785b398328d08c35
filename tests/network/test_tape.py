"""Recorded losses, for what gradient checkpointing computes a second time."""

import numpy as np
import pytest

from lossytp.network.losses import Bernoulli
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.routes import Missing, Wire
from lossytp.network.routes import sender_reduce as reduce
from lossytp.network.scope import LossTape

ONE, TWO = Missing([np.array([0])]), Missing([np.array([1, 4]), np.array([0])])


def test_a_tape_replays_in_order_and_from_the_start_each_time():
    """A recomputation may stop early."""
    tape = LossTape()
    tape.record(ONE)
    tape.record(TWO)
    assert not tape.replaying
    tape.rewind()
    assert tape.replaying
    assert tape.next() is ONE
    tape.rewind()
    assert [tape.next() is ONE, tape.next() is TWO] == [True, True]


@pytest.fixture
def network():
    return LossyNetwork(Bernoulli(loss_rate=0.3), wire=Wire(mtu_bytes=60, header_bytes=44))


def send(network):
    """One message of 100 packets from each of two ranks: a replay by chance alone has odds of 2^-170."""
    missing = network.send(reduce(400, (0, 1)), 4)
    return [packets.tolist() for packets in missing.packets], missing.reliable


def numbers(network):
    """Of each element of such a message."""
    return [numbers.tolist() for numbers in network.normals(reduce(400, (0, 1)))]


def test_a_recomputed_collective_loses_the_same_and_advances_nothing(network):
    """Control: without the tape the second message loses other packets, and is counted."""
    tape = LossTape()
    with network.recording(tape):
        first, second = send(network), send(network)
    state = network.state_dict()
    for _ in range(2):
        with network.recording(tape):
            assert [send(network), send(network)] == [first, second]
    assert network.state_dict() == state
    assert send(network) not in (first, second)
    assert network.state_dict() != state


def test_recording_does_not_change_what_is_lost(network):
    plain = LossyNetwork(Bernoulli(loss_rate=0.3), wire=network.wire)
    with network.recording(LossTape()):
        recorded = [send(network), send(network)]
    assert [*recorded, send(network)] == [send(plain) for _ in range(3)]


def test_a_recomputation_that_stops_early_starts_again_from_the_first_collective(network):
    tape = LossTape()
    with network.recording(tape):
        first = send(network)
        send(network)
    for _ in range(2):
        with network.recording(tape):
            assert send(network) == first


def test_each_tape_has_losses_of_its_own_and_tapes_nest(network):
    outer, inner = LossTape(), LossTape()
    with network.recording(outer):
        first = send(network)
        with network.recording(inner):
            second = send(network)
        third = send(network)
    with network.recording(inner):
        assert send(network) == second
    with network.recording(outer):
        assert [send(network), send(network)] == [first, third]


def test_recording_ends_with_its_block_even_by_an_exception(network):
    tape = LossTape()
    state = network.state_dict()

    def record_and_fail():
        with network.recording(tape):
            send(network)
            raise KeyError

    with pytest.raises(KeyError):
        record_and_fail()
    assert network.state_dict() != state
    assert send(network) != send(network)  # neither recorded nor replayed
    assert tape.replaying


def test_reliable_collectives_stay_reliable_when_replayed(network):
    tape = LossTape()
    with network.recording(tape):
        first = send(network)
        with network.reliable():
            send(network)
    with network.recording(tape):
        assert send(network) == first
        with network.reliable():
            assert send(network) == ([], True)


def test_recorded_noise_comes_again_between_recorded_losses(network):
    """Control: without the tape other numbers follow."""
    tape = LossTape()
    with network.recording(tape):
        recorded = [send(network), numbers(network), send(network), numbers(network)]
    state = network.state_dict()
    with network.recording(tape):
        assert [send(network), numbers(network), send(network), numbers(network)] == recorded
    assert network.state_dict() == state
    assert numbers(network) not in recorded
