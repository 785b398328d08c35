"""Families: their chains are their processes' own laws."""

import numpy as np
import pytest

from lossytp.probe.fitting import FAMILIES
from tests.probe.fitting.recordings import VALUES


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chain_has_the_loss_rate_and_autocorrelation_of_its_process(name):
    values = np.array(VALUES[name])
    process, chain = FAMILIES[name].process(values), FAMILIES[name].chain(values)
    rate = chain.start @ chain.loss
    assert rate == pytest.approx(process.loss_rate)
    np.testing.assert_allclose(chain.start @ chain.transition, chain.start, atol=1e-12)
    np.testing.assert_allclose(chain.received + chain.lost, chain.transition)
    for lag in (1, 2, 7):
        steps = np.linalg.matrix_power(chain.transition, lag)
        both = (chain.start * chain.loss) @ steps @ chain.loss
        assert (both - rate**2) / (rate * (1 - rate)) == pytest.approx(process.autocorrelation(lag), abs=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_of_one_choice_share_a_row(name):
    family = FAMILIES[name]
    assert len(family.parameters) == len(family.rows) == len(VALUES[name])
    together = family.same_row.sum(axis=0)
    assert together.tolist() == ([2, 2, 2, 1, 2] if name == "four-state Markov" else [1] * len(together))
