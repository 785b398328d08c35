"""Maximisation: the gradient, EM's steps, and the top."""

import numpy as np
import pytest

from lossytp.probe.fitting import FAMILIES, Likelihood, maximise
from tests.probe.fitting.recordings import TRUTHS, VALUES, recorded

SHORT = (400, 3, 1, 200, 30, 800)  # packets of many flows, whose starts weigh


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_is_that_of_the_log_likelihood(name):
    likelihood = Likelihood(FAMILIES[name], recorded(TRUTHS["Gilbert-Elliott"], *SHORT))
    odds = likelihood.odds(np.array(VALUES[name]))
    _, gradient = likelihood.at(odds)
    steps = 1e-4 * np.eye(len(odds))
    numeric = [(likelihood.at(odds + step)[0] - likelihood.at(odds - step)[0]) / 2e-4 for step in steps]
    np.testing.assert_allclose(gradient, numeric, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_odds_and_values_are_inverse(name):
    likelihood = Likelihood(FAMILIES[name], recorded(TRUTHS[name], 500))
    np.testing.assert_allclose(likelihood.values(likelihood.odds(np.array(VALUES[name]))), VALUES[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_em_climbs(name):
    likelihood = Likelihood(FAMILIES[name], recorded(TRUTHS[name], 50_000))
    values, reached = np.array(VALUES[name]), []
    for _ in range(8):
        log_likelihood, values = likelihood.em_step(values)
        reached.append(log_likelihood)
    assert (np.diff(reached) > -1e-6).all()
    assert reached[-1] > reached[0] + 10


@pytest.mark.parametrize("name", FAMILIES)
def test_the_top_is_flat_and_above_the_truth(name):
    flows = recorded(TRUTHS[name], 50_000, *SHORT)
    likelihood = Likelihood(FAMILIES[name], flows)
    top = maximise(likelihood, flows)
    truth = np.array([getattr(TRUTHS[name], each) for each in FAMILIES[name].parameters])
    assert likelihood.at(likelihood.odds(truth))[0] <= top.log_likelihood + 1e-6
    assert top.log_likelihood < likelihood.at(likelihood.odds(truth))[0] + 12  # chi2(5) / 2 is below but for 1 in 10^4
    assert np.abs(likelihood.at(likelihood.odds(top.values))[1]).max() < 0.5  # expected events
