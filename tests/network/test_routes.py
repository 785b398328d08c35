"""Collective algorithms as packet routes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.routes import ALGORITHMS, SWITCH, Hop, algorithm_named, chunk_bounds, direct, sender
from tests.network.loss_statistics import reproducible

lengths = st.integers(0, 60)
groups = st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True).map(tuple)


@reproducible
@given(num_elements=st.integers(0, 10**6), num_chunks=st.integers(1, 64))
def test_chunks_cover_the_message_once_in_order(num_elements, num_chunks):
    """Also where there are fewer elements than chunks, and none."""
    bounds = chunk_bounds(num_elements, num_chunks)
    assert len(bounds) == num_chunks
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_elements
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(bounds))
    assert all(0 <= stop - start <= -(-num_elements // num_chunks) for start, stop in bounds)


@pytest.mark.parametrize(
    ("num_elements", "num_chunks", "bounds"),
    [
        (12, 4, [(0, 3), (3, 6), (6, 9), (9, 12)]),
        (10, 4, [(0, 3), (3, 6), (6, 9), (9, 10)]),
        (9, 4, [(0, 3), (3, 6), (6, 9), (9, 9)]),
        (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (0, 2, [(0, 0), (0, 0)]),
        (5, 1, [(0, 5)]),
    ],
)
def test_chunks_by_hand(num_elements, num_chunks, bounds):
    assert chunk_bounds(num_elements, num_chunks) == bounds


def crossings(hops):
    """Which links each (position, element) crosses."""
    crossed = {}
    for hop in hops:
        for position in hop.positions:
            for element in range(hop.start, hop.stop):
                crossed.setdefault((position, element), []).append((hop.src, hop.dst))
    return crossed


@reproducible
@given(num_elements=lengths, ranks=groups)
def test_sender_puts_each_ranks_whole_contribution_on_a_link_of_its_own(num_elements, ranks):
    expected = {
        (position, element): [(rank, SWITCH)] for position, rank in enumerate(ranks) for element in range(num_elements)
    }
    assert crossings(sender(num_elements, ranks)) == expected


@reproducible
@given(num_elements=lengths, ranks=groups)
def test_direct_sends_each_element_to_the_owner_of_its_chunk(num_elements, ranks):
    """Element e belongs to the rank at position e // ceil(n / R); its own part crosses no link."""
    expected = {}
    for position, rank in enumerate(ranks):
        for element in range(num_elements):
            owner = ranks[element // -(-num_elements // len(ranks))]
            if owner != rank:
                expected[position, element] = [(rank, owner)]
    assert crossings(direct(num_elements, ranks)) == expected


@reproducible
@given(num_elements=lengths, ranks=groups)
def test_direct_hops_are_one_packetised_chunk_each_and_none_is_empty(num_elements, ranks):
    hops = direct(num_elements, ranks)
    assert all(hop.src != hop.dst and hop.start < hop.stop for hop in hops)
    assert all((hop.start, hop.stop) == chunk_bounds(num_elements, len(ranks))[ranks.index(hop.dst)] for hop in hops)
    assert len({(hop.src, hop.dst) for hop in hops}) == len(hops)


def test_direct_by_hand():
    """Ranks 6 and 4, in this order, own elements [0, 3) and [3, 5)."""
    assert direct(5, (6, 4)) == (Hop(6, 4, 3, 5, positions=(0,)), Hop(4, 6, 0, 3, positions=(1,)))


def test_a_share_of_one_in_r_of_the_contributions_crosses_no_link_in_direct():
    assert len(crossings(direct(4000, (0, 1, 2, 3)))) == 4 * 4000 * 3 // 4
    assert len(crossings(sender(4000, (0, 1, 2, 3)))) == 4 * 4000


def test_one_rank_alone_sends_nothing_in_direct():
    assert direct(100, (3,)) == ()


def test_algorithms_are_found_by_name():
    assert {name: algorithm_named(name).reduce for name in ALGORITHMS} == {"sender": sender, "direct": direct}


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"algorithm = 'rign' is unknown: choose one of .*direct"):
        algorithm_named("rign")
