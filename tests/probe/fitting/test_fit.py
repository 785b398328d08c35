"""Fits: they find the truth, choose the family, and bear recordings that say little.

`python -m tests.bench.fitting` does the same with 100 traces of each family.
"""

import time
from importlib import import_module

import numpy as np
import pytest

from lossytp.network import Bernoulli, GilbertElliott, loss_process_named
from lossytp.probe.fitting import FAMILIES, Maximum, fit, fit_family
from tests.probe.fitting.recordings import TRUTHS, bits, recorded

SECONDS = 20


def test_a_gilbert_elliott_channel_is_recovered_from_a_million_packets():
    truth = GilbertElliott(p_good_to_bad=0.01, p_bad_to_good=0.1, loss_bad=0.6, loss_good=0.01)
    flows = recorded(truth, 1_000_000)
    begun = time.process_time()
    found = fit_family(FAMILIES["Gilbert-Elliott"], flows)
    assert time.process_time() - begun < SECONDS
    values = [getattr(truth, name) for name in found.family.parameters]
    np.testing.assert_allclose(found.values, values, rtol=0.05)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_bic_chooses_the_family_that_made_the_trace(name, seed):
    fits = fit(recorded(TRUTHS[name], 60_000, seed=seed))
    assert fits[0].family.name == name
    assert [each.bic for each in fits] == sorted(each.bic for each in fits)


def test_many_short_flows_show_states_that_outlast_them():
    """No flow of 100 packets sees a whole sojourn of 1,000; their starts do."""
    truth = GilbertElliott(p_good_to_bad=0.0005, p_bad_to_good=0.001, loss_bad=0.5, loss_good=0.01)
    found = fit_family(FAMILIES["Gilbert-Elliott"], recorded(truth, *[100] * 1000))
    np.testing.assert_allclose(found.values, [0.0005, 0.001, 0.5, 0.01], rtol=0.3)
    assert found.process.loss_rate == pytest.approx(truth.loss_rate, rel=0.1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fit_is_a_loss_type(name):
    found = fit_family(FAMILIES[name], recorded(TRUTHS[name], 20_000))
    process = loss_process_named(found.loss_type)
    assert type(process) is type(found.process)
    assert process.loss_rate == pytest.approx(found.process.loss_rate, rel=1e-6)
    assert process.mean_burst_packets == pytest.approx(found.process.mean_burst_packets, rel=1e-6)


def test_the_bad_state_is_the_one_that_loses_more(monkeypatch):
    """Two states in either order are one channel. The likelihood may be largest with the first one the worse."""
    swapped = np.array([0.05, 0.01, 0.02, 0.6])
    module = import_module("lossytp.probe.fitting")  # the package's own `fit` is the function
    monkeypatch.setattr(module, "maximise", lambda likelihood, flows: Maximum(swapped, -1.0))
    found = fit_family(FAMILIES["Gilbert-Elliott"], recorded(TRUTHS["Bernoulli"], 1000))
    assert found.values == (0.01, 0.05, 0.6, 0.02)
    assert found.process.loss_rate == pytest.approx(FAMILIES["Gilbert-Elliott"].process(swapped).loss_rate)


@pytest.mark.parametrize("name", ["Bernoulli", "simple Gilbert"])
def test_closed_forms_equal_em(name):
    """Where the states show, the top is a share of counts, but for the weight of the first packet's state."""
    flows = recorded(TRUTHS[name], 50_000)
    found = fit_family(FAMILIES[name], flows)
    lost = np.isin(np.arange(50_000), flows[0].lost)
    of_pairs = [lost[1:][~lost[:-1]].mean(), 1 - lost[1:][lost[:-1]].mean()]
    expected = [lost.mean()] if name == "Bernoulli" else of_pairs
    np.testing.assert_allclose(found.values, expected, rtol=2e-3)


@pytest.mark.parametrize(
    ("text", "rate"), [("0", 0), ("1", 1), ("000", 0), ("111", 1), ("010", 1 / 3), ("1" * 40 + "0", 40 / 41)]
)
def test_recordings_that_say_little_are_bernoulli(text, rate):
    fits = fit([bits(text)])
    assert len(fits) == 1
    assert fits[0].process == Bernoulli(loss_rate=rate)
    assert fits[0].log_likelihood == pytest.approx(sum(np.log(rate if bit == "1" else 1 - rate) for bit in text))


@pytest.mark.parametrize("text", ["01" * 20, "0" * 30 + "1" * 30, "1" * 300 + "0" * 10, "0" * 10_000 + "1" * 10])
def test_odd_recordings_are_fitted(text):
    for each in fit([bits(text)]):
        assert np.isfinite(each.bic)
        assert each.process.loss_rate > 0


def test_no_flow_is_refused():
    with pytest.raises(ValueError, match="flows is empty"):
        fit([])


@pytest.mark.parametrize(("text", "lost"), [("0000", 0), ("1111", 4)])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "Bernoulli"])
def test_no_other_family_is_fitted_to_packets_of_one_fate(name, text, lost):
    with pytest.raises(ValueError, match=f"{lost} of 4 packets are lost, which shows no {name} process: give flows"):
        fit_family(FAMILIES[name], [bits(text)])
