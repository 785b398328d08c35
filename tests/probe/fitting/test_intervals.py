"""Intervals hold the truth as often as they say, and say so where the flows do not."""

import numpy as np
import pytest
from scipy import stats
from scipy.special import logit

from lossytp.network import GilbertElliott
from lossytp.probe.fitting import FAMILIES, Fit, fit_family, intervals
from tests.probe.fitting.recordings import TRUTHS, bits, recorded

TRIALS = 40


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_intervals_hold_the_truth_and_are_as_wide_as_fits_scatter(name):
    truth, family = TRUTHS[name], FAMILIES[name]
    names = (*family.parameters, "loss_rate", "mean_burst_packets")
    held, centres, widths = np.zeros(len(names)), [], []
    for seed in range(TRIALS):
        flows = recorded(truth, 12_000, seed=seed)
        fitted = fit_family(family, flows)
        found = intervals(fitted, flows)
        held += [found[each].low <= getattr(truth, each) <= found[each].high for each in names]
        if found[names[0]].low > 0:
            ends = np.array([found[each] for each in names])
            ends[:-1] = logit(ends[:-1])
            ends[-1] = np.log(ends[-1])
            centres.append(ends.mean(axis=1))
            widths.append(np.diff(ends, axis=1)[:, 0])
    assert (held >= stats.binom.ppf(1e-4, TRIALS, 0.95)).all(), dict(zip(names, held, strict=True))
    ratio = np.median(widths, axis=0) / 3.92 / np.std(centres, axis=0, ddof=1)
    assert ((ratio > 0.6) & (ratio < 1.6)).all(), dict(zip(names, ratio, strict=True))


def test_bernoullis_interval_is_exact():
    """No loss in 300 packets: up to 1 - 0.025 ** (1 / 300)."""
    flows = [bits("0" * 300)]
    found = intervals(fit_family(FAMILIES["Bernoulli"], flows), flows)
    assert found["loss_rate"] == (0, pytest.approx(1 - 0.025 ** (1 / 300)))


def test_a_parameter_at_its_end_reaches_to_where_the_likelihood_falls():
    """Without a loss in n good packets, by log odds, exp(-n k) falls by 1.92 nats at k = 1.92 / n."""
    truth = GilbertElliott(p_good_to_bad=0.005, p_bad_to_good=0.02, loss_bad=0.8)
    flows = recorded(truth, 50_000)
    fitted = fit_family(FAMILIES["Gilbert-Elliott"], flows)
    found = intervals(fitted, flows)["loss_good"]
    good_packets = 50_000 * (1 - truth.share_bad)
    assert fitted.values[3] < 1e-5
    assert found.low == 0
    assert 1 / good_packets < found.high < 10 / good_packets


def test_bursts_of_one_packet_have_an_interval_that_goes_beyond():
    flows = [bits("0001" * 50)]
    fitted = fit_family(FAMILIES["simple Gilbert"], flows)
    found = intervals(fitted, flows)
    assert fitted.process.mean_burst_packets == pytest.approx(1, abs=1e-6)
    assert found["p_bad_to_good"].low == pytest.approx(1 - 1.92 / 50, abs=0.01)
    assert found["mean_burst_packets"].high > 1.03


def test_what_the_flows_do_not_determine_says_so():
    """If both states lose alike, nobody can tell when they change."""
    flows = recorded(TRUTHS["Bernoulli"], 20_000)
    alike = Fit(FAMILIES["Gilbert-Elliott"], (0.01, 0.1, 0.02, 0.02), -1.0, 20_000)
    found = intervals(alike, flows)
    assert found["p_good_to_bad"] == found["p_bad_to_good"] == (0, 1)
    assert found["loss_rate"].high - found["loss_rate"].low < 0.01
