"""Arguments of unusual types and at unusual moments."""

import json
import re

import numpy as np
import pytest

from lossytp.network import Bernoulli, GilbertElliott, LossyNetwork

HALF = Bernoulli(loss_rate=0.5)


def test_integers_of_numpy_name_the_same_streams_and_leave_the_state_json_ready():
    plain, numpys = LossyNetwork(HALF, seed=3), LossyNetwork(HALF, seed=np.int64(3))
    first = plain.lost_packets(0, 1, 100)
    assert first.tolist() == numpys.lost_packets(np.int64(0), np.int32(1), np.int64(100)).tolist()
    assert json.dumps(numpys.state_dict()) == json.dumps(plain.state_dict())
    with plain.evaluation(5), numpys.evaluation(np.int64(5)):
        assert plain.lost_packets(0, 1, 100).tolist() == numpys.lost_packets(0, 1, 100).tolist()


def test_a_float_names_no_stream():
    with pytest.raises(TypeError):
        LossyNetwork(HALF, seed=0.5)


@pytest.mark.parametrize("process", [0.01, None, {(0, 1): 0.1}])
def test_a_rate_is_no_process(process):
    with pytest.raises(ValueError, match=r"is not a loss process: give one, such as Bernoulli\(loss_rate=0.01\)"):
        LossyNetwork(process)


def test_a_reliable_network_loses_no_packets_and_stands_still():
    network, other = LossyNetwork(HALF), LossyNetwork(HALF)
    with network.reliable():
        assert network.lost_packets(0, 1, 100).tolist() == []
    assert network.lost_packets(0, 1, 100).tolist() == other.lost_packets(0, 1, 100).tolist()
    assert network.counters.summary("training")["packets"] == 100


def test_states_are_loaded_where_trainings_links_are():
    network = LossyNetwork(HALF)
    state = network.state_dict()
    with network.evaluation(1), pytest.raises(ValueError, match="within evaluation"):
        network.load_state_dict(state)


@pytest.mark.parametrize(("rate", "burst"), [(0.9, 9), (0.8, 4), (0.75, 3), (0.5, 1)])
def test_the_shortest_burst_that_the_bound_names_is_taken(rate, burst):
    process = GilbertElliott.from_loss_and_burst(loss_rate=rate, mean_burst_packets=burst)
    assert process.loss_rate == pytest.approx(rate)
    assert process.mean_burst_packets == pytest.approx(burst)


def test_a_rate_of_numpy_is_a_rate():
    assert Bernoulli(loss_rate=np.float32(0.5)).loss_rate == 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wire": 1500}, "wire = 1500 is of type int, not Wire: give one, such as Wire(mtu_bytes=1500)"),
        ({"wire": 0}, "wire = 0 is of type int, not Wire: give one, such as Wire(mtu_bytes=1500)"),
        (
            {"scope": "forward"},
            "scope = 'forward' is of type str, not Scope: give one, such as Scope(direction=\"forward\")",
        ),
        ({"scope": None}, 'scope = None is of type NoneType, not Scope: give one, such as Scope(direction="forward")'),
        ({"seed": "1"}, "seed = '1' is not a whole number: give one, such as 0"),
        ({"seed": True}, "seed = True is not a whole number: give one, such as 0"),
        ({"seed": None}, "seed = None is not a whole number: give one, such as 0"),
    ],
)
def test_a_network_is_made_of_what_its_arguments_are_for(given, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        LossyNetwork(HALF, **given)


@pytest.mark.parametrize("step", ["3", 0.5, True, None])
def test_an_evaluations_step_is_a_whole_number(step):
    network = LossyNetwork(HALF)
    with pytest.raises(TypeError, match=r"^step = .* is not a whole number: give the"), network.evaluation(step):
        pass
    assert network.block == ("training", 0)
