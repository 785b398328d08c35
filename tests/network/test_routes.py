"""Collective algorithms as packet routes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.routes import (
    SWITCH,
    Algorithm,
    Hop,
    algorithm_named,
    chunk_bounds,
    direct,
    direct_gather,
    sender,
    sender_gather,
)
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


@reproducible
@given(num_elements=lengths, ranks=groups)
def test_sender_gather_sends_each_chunk_over_its_owners_link_to_everyone(num_elements, ranks):
    expected = {
        (position, element): [(ranks[element // -(-num_elements // len(ranks))], SWITCH)]
        for position in range(len(ranks))
        for element in range(num_elements)
    }
    assert crossings(sender_gather(num_elements, ranks)) == expected


@reproducible
@given(num_elements=lengths, ranks=groups)
def test_direct_gather_sends_each_chunk_from_its_owner_to_every_other_rank(num_elements, ranks):
    """It reaches its owner over no link."""
    expected = {}
    for element in range(num_elements):
        owner = ranks[element // -(-num_elements // len(ranks))]
        for position, rank in enumerate(ranks):
            if owner != rank:
                expected[position, element] = [(owner, rank)]
    assert crossings(direct_gather(num_elements, ranks)) == expected


@reproducible
@given(num_elements=lengths, ranks=groups)
@pytest.mark.parametrize("gather", [sender_gather, direct_gather])
def test_gather_hops_are_one_packetised_chunk_each_and_none_is_empty(gather, num_elements, ranks):
    hops = gather(num_elements, ranks)
    bounds = chunk_bounds(num_elements, len(ranks))
    assert all(hop.src != hop.dst and hop.start < hop.stop for hop in hops)
    assert all((hop.start, hop.stop) == bounds[ranks.index(hop.src)] for hop in hops)
    assert len({(hop.src, hop.dst) for hop in hops}) == len(hops)


def test_gathers_by_hand():
    """Ranks 6 and 4, in this order, own elements [0, 3) and [3, 5)."""
    assert direct_gather(5, (6, 4)) == (Hop(6, 4, 0, 3, positions=(1,)), Hop(4, 6, 3, 5, positions=(0,)))
    assert sender_gather(5, (6, 4)) == (Hop(6, SWITCH, 0, 3, (0, 1)), Hop(4, SWITCH, 3, 5, (0, 1)))


def test_one_rank_alone_gathers_from_nobody_in_direct():
    assert direct_gather(100, (3,)) == ()


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("sender", Algorithm(sender, sender_gather)), ("direct", Algorithm(direct, direct_gather))],
)
def test_algorithms_are_found_by_name(name, algorithm):
    assert algorithm_named(name) == algorithm
    assert (algorithm.reduce, algorithm.gather) == tuple(algorithm)


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"^algorithm = 'rign' is unknown: choose one of sender, direct$"):
        algorithm_named("rign")
