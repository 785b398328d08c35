"""The words of routes: chunks, and what is missing."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.routes import Missing, chunk_bounds, no_hops
from tests.network.loss_statistics import reproducible


@reproducible
@given(num_elements=st.integers(0, 10**6), num_chunks=st.integers(1, 64), unit=st.integers(1, 100))
def test_chunks_cover_the_message_once_in_order(num_elements, num_chunks, unit):
    """Also where there are fewer elements than chunks, and none."""
    bounds = chunk_bounds(num_elements, num_chunks, unit)
    assert len(bounds) == num_chunks
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_elements
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(bounds))
    longest = -(-num_elements // (num_chunks * unit)) * unit
    assert all(0 <= stop - start <= longest for start, stop in bounds)
    assert all(start % unit == 0 or start == num_elements for start, _ in bounds)


@pytest.mark.parametrize(
    ("num_elements", "num_chunks", "unit", "bounds"),
    [
        (12, 4, 1, [(0, 3), (3, 6), (6, 9), (9, 12)]),
        (10, 4, 1, [(0, 3), (3, 6), (6, 9), (9, 10)]),
        (9, 4, 1, [(0, 3), (3, 6), (6, 9), (9, 9)]),
        (2, 4, 1, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (0, 2, 1, [(0, 0), (0, 0)]),
        (5, 1, 1, [(0, 5)]),
        (20, 3, 4, [(0, 8), (8, 16), (16, 20)]),
        (20, 2, 10, [(0, 10), (10, 20)]),
        (20, 4, 10, [(0, 10), (10, 20), (20, 20), (20, 20)]),
    ],
)
def test_chunks_by_hand(num_elements, num_chunks, unit, bounds):
    assert chunk_bounds(num_elements, num_chunks, unit) == bounds


def test_a_message_lacks_something_where_any_hop_does():
    none, some = np.array([], dtype=np.int64), np.array([0])
    assert not Missing([]).any
    assert not Missing([none, none]).any
    assert Missing([none, some]).any
    assert not Missing([]).reliable


def test_a_phase_may_have_no_hops():
    assert no_hops(100, (0, 1), 1) == ()
