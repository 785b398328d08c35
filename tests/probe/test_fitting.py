"""Fits find the truth and choose the family; their intervals, goodness of fit, and flows that lose packets together."""

import time

import numpy as np
import pytest
from scipy import stats
from scipy.special import logit

from lossyprobe.commands import UNLIKELY
from lossyprobe.fitting import Fit, Law, correlation_between, fit, fit_family, goodness, intervals, num_simulations
from lossyprobe.likelihood import FAMILIES, Likelihood
from lossytp.network import Bernoulli, GilbertElliott, Trace, loss_process_named
from tests.probe.recordings import TRUTHS, bits, recorded

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
    monkeypatch.setattr(Likelihood, "maximise", lambda likelihood, flows: swapped)
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
            ends = np.vstack([logit(ends[:-1]), np.log(ends[-1:])])
            if np.isfinite(ends).all():  # an end at 0 or 1 has no width
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


def test_what_the_flows_do_not_determine_says_so():
    """If both states lose alike, nobody can tell when they change."""
    flows = recorded(TRUTHS["Bernoulli"], 20_000)
    alike = Fit(FAMILIES["Gilbert-Elliott"], (0.01, 0.1, 0.02, 0.02), -1.0, 20_000)
    found = intervals(alike, flows)
    assert found["p_good_to_bad"] == found["p_bad_to_good"] == (0, 1)
    assert found["loss_rate"].high - found["loss_rate"].low < 0.01
    outage = [bits("0" * 10_000 + "1" * 10)]  # whose length nobody knows
    assert intervals(fit(outage)[0], outage)["mean_burst_packets"] == (1, np.inf)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_family_that_made_the_trace_fits(name):
    flows = recorded(TRUTHS[name], 20_000, 3_000)
    found = goodness(fit_family(FAMILIES[name], flows), flows)
    assert found.simulations == 99
    assert min(found.bursts.p, found.gaps.p) > 0.02


@pytest.mark.parametrize(
    ("truth", "fitted", "law"),
    [
        *(("simple Gilbert", "Bernoulli", "bursts"), ("Gilbert-Elliott", "simple Gilbert", "gaps")),
        ("four-state Markov", "Gilbert-Elliott", "gaps"),
    ],
)
def test_another_family_does_not_fit(truth, fitted, law):
    flows = recorded(TRUTHS[truth], 20_000)
    found = getattr(goodness(fit_family(FAMILIES[fitted], flows), flows), law)
    assert found.p == pytest.approx(0.01)
    assert found.statistic > 0.1


def test_short_flows_fit_although_they_cut_runs_short():
    flows = recorded(TRUTHS["simple Gilbert"], *[60] * 40)
    found = goodness(fit_family(FAMILIES["simple Gilbert"], flows), flows)
    assert min(found.bursts.p, found.gaps.p) > 0.02
    assert found.gaps.fitted.lengths.max() < 60
    assert 1 / (1 + num_simulations([flows[0]] * 100_000)) < UNLIKELY, "of any number of flows, a fit can be refused"


def test_statistic_and_laws():
    flows = recorded(TRUTHS["simple Gilbert"], 20_000)
    found = goodness(fit_family(FAMILIES["Bernoulli"], flows), flows).bursts
    recorded_lengths = np.repeat(found.recorded.lengths, found.recorded.counts)
    fitted_lengths = np.repeat(found.fitted.lengths, found.fitted.counts)
    assert recorded_lengths.sum() == len(flows[0].lost)
    assert fitted_lengths.sum() == pytest.approx(99 * len(flows[0].lost), rel=0.05)
    assert found.statistic == pytest.approx(stats.ks_2samp(recorded_lengths, fitted_lengths).statistic)
    law = Law(np.array([1, 3]), np.array([2, 6]))
    assert law.share_up_to(np.array([0, 1, 2, 3, 9])).tolist() == [0, 0.25, 0.25, 1, 1]


def test_flows_that_share_a_queue_are_together_and_independent_ones_are_not():
    flow, other = recorded(TRUTHS["Gilbert-Elliott"], 20_000, 20_000)
    assert correlation_between([flow, flow]) == pytest.approx(1)
    assert abs(correlation_between([flow, other])) < 0.35  # 3.5 standard errors of 100 windows
    congested = np.repeat(np.random.default_rng(0).random(100) < 0.3, 50)
    draws = np.random.default_rng(1).random((2, 5000))
    flows = [Trace.from_indicators(congested & (each < 0.4)) for each in draws]
    assert not np.intersect1d(flows[0].lost, flows[1].lost).size > 0.6 * len(flows[0].lost)
    counts = [np.histogram(flow.lost, np.linspace(0, 5000, 101))[0] for flow in flows]
    assert correlation_between(flows) == pytest.approx(np.corrcoef(counts)[0, 1])
    assert correlation_between(flows) > 0.9
