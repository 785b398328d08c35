"""Goodness of fit: the right law passes, a wrong one does not."""

import numpy as np
import pytest
from scipy import stats

from lossytp.probe.fitting import FAMILIES, Law, fit_family, goodness, num_simulations
from tests.probe.fitting.recordings import TRUTHS, bits, recorded


@pytest.mark.parametrize("name", FAMILIES)
def test_the_family_that_made_the_trace_fits(name):
    flows = recorded(TRUTHS[name], 20_000, 3_000)
    found = goodness(fit_family(FAMILIES[name], flows), flows)
    assert found.simulations == 99
    assert min(found.bursts.p, found.gaps.p) > 0.02


@pytest.mark.parametrize(
    ("truth", "fitted", "law"),
    [
        ("simple Gilbert", "Bernoulli", "bursts"),
        ("Gilbert-Elliott", "simple Gilbert", "gaps"),
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


def test_statistic_and_laws():
    flows = recorded(TRUTHS["simple Gilbert"], 20_000)
    found = goodness(fit_family(FAMILIES["Bernoulli"], flows), flows).bursts
    recorded_lengths = np.repeat(found.recorded.lengths, found.recorded.counts)
    fitted_lengths = np.repeat(found.fitted.lengths, found.fitted.counts)
    assert recorded_lengths.sum() == len(flows[0].lost)
    assert fitted_lengths.sum() == pytest.approx(99 * len(flows[0].lost), rel=0.05)
    assert found.statistic == pytest.approx(stats.ks_2samp(recorded_lengths, fitted_lengths).statistic)


def test_a_law_by_hand():
    law = Law(np.array([1, 3]), np.array([2, 6]))
    assert law.share_up_to(np.array([0, 1, 2, 3, 9])).tolist() == [0, 0.25, 0.25, 1, 1]


@pytest.mark.parametrize("text", ["000", "111"])
def test_nothing_to_compare(text):
    found = goodness(fit_family(FAMILIES["Bernoulli"], [bits(text)]), [bits(text)])
    assert found.bursts.p == found.gaps.p == 1


def test_many_flows_get_fewer_simulations():
    assert [num_simulations([bits("0")] * flows) for flows in (1, 600, 5000)] == [99, 33, 19]


def test_every_simulation_is_watched():
    watched = []
    flows = [bits("0010")]
    assert goodness(fit_family(FAMILIES["Bernoulli"], flows), flows, watch=lambda: watched.append(1)).simulations == 99
    assert len(watched) == 99
