"""The blocks of a lossy network: evaluation apart from training, and reliable messages."""

import copy
import pickle

import pytest

from lossytp.network import LossyNetwork
from lossytp.network.routes import DIRECT as direct
from lossytp.network.scope import LossTape
from tests.network.loss_statistics import assert_within, correlation, indicators
from tests.network.lossy_traffic import (
    BERNOULLI,
    BURSTS,
    EVERYTHING,
    NOTHING,
    RANKS,
    TWO_FLOATS,
    both_processes,
    drawn,
    loses,
    sent,
)


@both_processes
def test_evaluation_does_not_shift_trainings_losses(process):
    """Wherever it falls; control: the same traffic outside the block does shift them."""
    with_evaluation, without, shifted = (LossyNetwork(process) for _ in range(3))
    expected = drawn(without) + drawn(without)
    first = drawn(with_evaluation)
    with with_evaluation.evaluation(step=20):
        drawn(with_evaluation, num_packets=333)
        drawn(with_evaluation, 1, 0)
    assert first + drawn(with_evaluation) == expected
    first = drawn(shifted)
    drawn(shifted, num_packets=333)
    assert first + drawn(shifted) != expected


@both_processes
def test_an_evaluation_loses_the_same_packets_at_the_same_step(process):
    """However far training is, and however often; other packets at other steps, and than training."""

    def evaluate(network, step):
        with network.evaluation(step):
            return drawn(network) + drawn(network, 1, 0)

    fresh, trained = LossyNetwork(process), LossyNetwork(process)
    training = drawn(trained) + drawn(trained, 1, 0)
    assert evaluate(trained, 20) == evaluate(trained, 20) == evaluate(fresh, 20)
    losses = [tuple(evaluate(fresh, step)) for step in (0, 20, 40)]
    assert len({*losses, tuple(training)}) == 4


def test_an_evaluation_is_independent_of_training():
    network = LossyNetwork(BERNOULLI)
    training = indicators(network.lost_packets(0, 1, 400_000), 400_000)
    with network.evaluation(step=0):
        evaluation = indicators(network.lost_packets(0, 1, 400_000), 400_000)
    assert_within(correlation(training, evaluation, 0.1), 0, "correlation")


def test_evaluations_nest():
    network, plain = LossyNetwork(BERNOULLI), LossyNetwork(BERNOULLI)
    with plain.evaluation(1):
        expected = [drawn(plain), drawn(plain), drawn(plain, 1, 0)]
    with network.evaluation(1):
        first = drawn(network)
        with network.evaluation(2):
            assert drawn(network) != first
        assert [first, drawn(network), drawn(network, 1, 0)] == expected
    assert drawn(network) == drawn(plain)


def test_reliable_loses_nothing_advances_nothing_counts_nothing():
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    assert loses(network)
    state = network.state_dict()
    assert not network.suspended
    with network.reliable():
        assert network.suspended
        assert sent(network) == ([], True)
        assert network.normals(direct.reduce(4000, RANKS)) == []
    assert not network.suspended
    assert network.state_dict() == state
    lost, reliable = sent(network)
    assert any(lost)
    assert not reliable


def test_reliable_does_not_shift_what_follows():
    network, plain = LossyNetwork(BURSTS, wire=TWO_FLOATS), LossyNetwork(BURSTS, wire=TWO_FLOATS)
    first = sent(network)
    with network.reliable():
        sent(network)
    assert [first, sent(network)] == [sent(plain), sent(plain)]


def test_a_message_without_losses_is_not_taken_for_a_reliable_one():
    """A repair scales what crossed a lossy link, whether or not anything was lost on the way."""
    assert sent(LossyNetwork(NOTHING)) == ([[]] * 12, False)
    assert not LossyNetwork(NOTHING).send(direct.reduce(4000, RANKS), 4).any
    assert LossyNetwork({(2, 0): EVERYTHING}).send(direct.reduce(4000, RANKS), 4).any


def test_reliable_blocks_nest():
    network = LossyNetwork(EVERYTHING)
    with network.reliable():
        with network.reliable():
            assert network.suspended
        assert network.suspended
        assert not loses(network)
    assert loses(network)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
@pytest.mark.parametrize("block", ["reliable", "evaluation", "recording"])
def test_a_copy_made_within_a_block_is_outside_of_it(block, duplicate):
    network, plain = (LossyNetwork(BERNOULLI, wire=TWO_FLOATS) for _ in range(2))
    assert sent(network) == sent(plain)
    blocks = {
        "reliable": network.reliable(),
        "evaluation": network.evaluation(7),
        "recording": network.recording(LossTape()),
    }
    with blocks[block], network.evaluation(8):
        sent(network)
        copied = duplicate(network)
    assert copied.tape is None
    assert copied.block == ("training", 0)
    assert sent(copied) == sent(plain)
    copied.load_state_dict(plain.state_dict())
    assert sent(duplicate(copied)) == sent(plain), "what was loaded is copied too"


def test_an_evaluation_can_be_made_reliable():
    network = LossyNetwork(EVERYTHING)
    with network.evaluation(3), network.reliable():
        assert not loses(network)
    assert network.counters.rows() == []


@pytest.mark.parametrize("block", ["reliable", "evaluation"])
def test_an_exception_ends_a_block(block):
    network, plain = LossyNetwork(BERNOULLI, wire=TWO_FLOATS), LossyNetwork(BERNOULLI, wire=TWO_FLOATS)

    def fail_within():
        with network.reliable() if block == "reliable" else network.evaluation(7):
            sent(network)
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert not network.suspended
    assert sent(network) == sent(plain)
    assert {row["purpose"] for row in network.counters.rows("training")} == {"training"}
