"""Settings as text."""

import numpy as np
import pytest

from lossytp.network import Bernoulli, Correlated, FourState, GilbertElliott, PerPacket, Scope, Trace, Wire
from lossytp.network.losses import described, process_described

SETTINGS = [
    Bernoulli(loss_rate=0.1),
    Bernoulli(loss_rate=0.2),
    GilbertElliott.from_loss_and_burst(loss_rate=0.1, mean_burst_packets=8),
    GilbertElliott(p_good_to_bad=0.2, p_bad_to_good=0.2, loss_bad=0.2),
    FourState(p13=0.1, p31=0.9),
    Correlated.from_loss_and_share(loss_rate=0.1, shared=0.5),
    Correlated.from_loss_and_share(loss_rate=0.1, shared=0.9),
    Correlated.from_loss_and_share(loss_rate=0.1, shared=0.5, switch=1),
    Trace(lost=[1, 5], num_packets=20),
    Trace(lost=[1, 6], num_packets=20),
    PerPacket(lambda packets, uniforms: packets % 10 == 0),
    PerPacket(lambda packets, uniforms: packets % 5 == 0),
]


def test_processes_of_one_rate_that_differ_are_told_apart():
    assert len({process_described(process) for process in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize("process", SETTINGS)
def test_a_description_is_one_line_without_an_address(process):
    assert "\n" not in process_described(process)
    assert "0x" not in process_described(process)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Bernoulli(loss_rate=0), Bernoulli(loss_rate=0.0)),
        (Bernoulli(loss_rate=0.5), Bernoulli(loss_rate=np.float32(0.5))),
        (Wire(mtu_bytes=1500), Wire(mtu_bytes=np.int64(1500))),
        (Scope(layers=(0, 2)), Scope(layers=[0, 2])),
    ],
)
def test_equal_settings_are_described_alike(one, other):
    assert described(one) == described(other)


def test_a_process_of_ones_own_is_named_by_its_type_and_its_rate():
    class Own:
        loss_rate = 0.25

    assert process_described(Own()) == "Own of loss rate 0.25"
