"""The closed-form first values."""

import numpy as np
import pytest

from lossytp.network import GilbertElliott
from lossytp.probe.fitting import FAMILIES, gilbert_elliott_moments, starts
from tests.probe.fitting.recordings import TRUTHS, bits, recorded


@pytest.mark.parametrize("name", ["Bernoulli", "simple Gilbert"])
def test_families_whose_states_show_start_at_the_top(name):
    values = starts(FAMILIES[name], recorded(TRUTHS[name], 300_000))[0]
    assert FAMILIES[name].process(values).loss_rate == pytest.approx(TRUTHS[name].loss_rate, rel=0.1)
    assert FAMILIES[name].process(values).mean_burst_packets == pytest.approx(TRUTHS[name].mean_burst_packets, rel=0.1)


@pytest.mark.parametrize("good", [0.0, 0.002])
def test_moments_find_a_gilbert_elliott_channel_whose_good_loss_is_known(good):
    truth = GilbertElliott(p_good_to_bad=0.01, p_bad_to_good=0.05, loss_bad=0.3, loss_good=good)
    values = gilbert_elliott_moments(recorded(truth, 1_000_000), good / truth.loss_rate)
    np.testing.assert_allclose(values, [0.01, 0.05, 0.3, good], rtol=0.1)


@pytest.mark.parametrize(
    "flow", ["01" * 10, "0" * 20 + "1" * 20, "1" * 60 + "0", "0" * 60 + "1", "0010011" * 9, "01" * 32, "0011" * 40]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_starts_are_processes_whatever_the_flow(name, flow):
    for values in starts(FAMILIES[name], [bits(flow)]):
        assert (values > 0).all()
        assert (values < 1).all()
        FAMILIES[name].process(values)
