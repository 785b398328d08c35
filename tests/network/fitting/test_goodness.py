"""Goodness of fit: the right law passes, a wrong one does not."""

import numpy as np
import pytest

from lossytp.network.fitting import FAMILIES, fit_family, goodness
from tests.network.fitting.recordings import TRUTHS, bits, recorded


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


def test_the_statistic_by_hand():
    """Three bursts of 1, 1 and 2 packets: P(>= 2) is 1/3, and P(>= 3) is 0; Bernoulli's are p and p^2."""
    flows = [bits("00100100110000")]
    found = goodness(fit_family(FAMILIES["Bernoulli"], flows), flows)
    rate = 4 / 14
    assert found.bursts.statistic == pytest.approx(max(abs(1 / 3 - rate), rate**2))


@pytest.mark.parametrize("text", ["000", "111"])
def test_nothing_to_compare(text):
    found = goodness(fit_family(FAMILIES["Bernoulli"], [bits(text)]), [bits(text)])
    assert found.simulations == 0
    assert found.bursts.p == found.gaps.p == 1


def test_many_flows_get_fewer_simulations():
    flows = recorded(TRUTHS["Bernoulli"], *[20] * 600)
    found = goodness(fit_family(FAMILIES["Bernoulli"], flows), flows)
    assert found.simulations == 33
    assert np.isclose(found.bursts.p * 34, round(found.bursts.p * 34))
