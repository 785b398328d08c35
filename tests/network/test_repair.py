"""What is done about missing contributions to a sum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.bernoulli import Bernoulli
from lossytp.network.repair import REPAIRS, Rescale, Zero, repair_named
from tests.network.loss_statistics import assert_within, batch_means, indicators, is_within, reproducible


@reproducible
@given(loss_rate=st.floats(0, 0.999999))
def test_rescale_is_the_inverse_of_the_delivery_probability(loss_rate):
    assert Rescale().weight(loss_rate) * (1 - loss_rate) == pytest.approx(1)


@reproducible
@given(loss_rate=st.floats(0, 1))
def test_zero_leaves_what_arrives_as_it_is(loss_rate):
    assert Zero().weight(loss_rate) == 1


@pytest.mark.parametrize("name", REPAIRS)
def test_without_losses_nothing_is_scaled(name):
    assert repair_named(name).weight(0) == 1
    assert repair_named(name).weight(0.0) == 1


def test_a_link_that_delivers_nothing_is_not_divided_by_zero():
    assert Rescale().weight(1) == 1


def test_rescaled_sums_are_unbiased_and_zero_filled_ones_are_not():
    """The mean of what arrives of 10^6 ones at a loss rate of 0.2; without repair it is 0.8."""
    lost = Bernoulli(loss_rate=0.2).losses((0, "test")).take(10**6)
    delivered = 1 - indicators(lost, 10**6).astype(np.float64)
    assert_within(batch_means(delivered * Rescale().weight(0.2)), 1, "rescaled")
    assert_within(batch_means(delivered * Zero().weight(0.2)), 0.8, "zero-filled")
    assert not is_within(batch_means(delivered * Zero().weight(0.2)), 1)


def test_repairs_are_found_by_name():
    assert repair_named("zero") == Zero()
    assert repair_named("rescale") == Rescale()


def test_an_unknown_repair_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="repair = 'fix' is unknown: choose one of zero, rescale"):
        repair_named("fix")
