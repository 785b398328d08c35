"""Collective algorithms as packet routes: which links a rank's element crosses, one after another."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network import ALGORITHMS, SWITCH
from lossytp.network.routes import DIRECT as direct
from lossytp.network.routes import RING as ring
from lossytp.network.routes import SENDER as sender
from lossytp.network.routes import SWITCH_ALGORITHM as switch
from lossytp.network.routes import TREE as tree
from lossytp.network.routes import Hop, algorithm_named, chunk_bounds
from tests.network.loss_statistics import reproducible

lengths = st.integers(0, 60)
groups = st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True).map(tuple)
PHASES = ("reduce", "gather", "reduce_scatter", "all_gather")


def crossings(hops):
    """The links that each (position, element) crosses, in the order of the hops."""
    crossed = {}
    for hop in hops:
        for position in hop.positions:
            for element in range(hop.start, hop.stop):
                crossed.setdefault((position, element), []).append((hop.src, hop.dst))
    return crossed


def along(stations):
    """Links from each to the next."""
    return list(itertools.pairwise(stations))


def to_the_root(position):
    return [position] if position == 0 else [position, *to_the_root((position - 1) // 2)]


def round_the_ring(first, last, size):
    return [(first + step) % size for step in range((last - first) % size + 1)]


def path(algorithm, phase, position, owner, size):
    """Stations, as positions or SWITCH, between a rank and the owner of the element's chunk."""
    up, down = to_the_root(position), to_the_root(position)[::-1]
    alone = position == owner
    return {
        ("sender", "reduce"): [position, SWITCH],
        ("sender", "reduce_scatter"): [position, SWITCH],
        ("sender", "gather"): [],
        ("sender", "all_gather"): [owner, SWITCH],
        ("direct", "reduce"): [] if alone else [position, owner],
        ("direct", "reduce_scatter"): [] if alone else [position, owner],
        ("direct", "gather"): [] if alone else [owner, position],
        ("direct", "all_gather"): [] if alone else [owner, position],
        ("ring", "reduce"): round_the_ring(position, owner, size),
        ("ring", "reduce_scatter"): round_the_ring(position, owner, size),
        ("ring", "gather"): round_the_ring(owner, position, size),
        ("ring", "all_gather"): round_the_ring(owner, position, size),
        ("tree", "reduce"): up,
        ("tree", "gather"): down,
        ("tree", "reduce_scatter"): up + to_the_root(owner)[::-1][1:],
        ("tree", "all_gather"): [] if alone else to_the_root(owner) + down[1:],
        ("switch", "reduce"): [position, SWITCH],
        ("switch", "gather"): [SWITCH, position],
        ("switch", "reduce_scatter"): [position, SWITCH, owner],
        ("switch", "all_gather"): [] if alone else [owner, SWITCH, position],
    }[algorithm, phase]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@reproducible
@given(num_elements=lengths, ranks=groups, unit=st.integers(1, 7))
def test_every_element_takes_its_path_one_link_after_another(algorithm, phase, num_elements, ranks, unit):
    """Ranks by their global names, whatever their order."""
    expected = {}
    names = dict(enumerate(ranks)) | {SWITCH: SWITCH}
    chunks = chunk_bounds(num_elements, len(ranks), unit)
    for element in range(num_elements):
        owner = next(c for c, (start, stop) in enumerate(chunks) if start <= element < stop)
        for position in range(len(ranks)):
            stations = [names[station] for station in path(algorithm, phase, position, owner, len(ranks))]
            if links := along(stations):
                expected[position, element] = links
    hops = getattr(ALGORITHMS[algorithm], phase)(num_elements, ranks, unit)
    assert crossings(hops) == expected


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@reproducible
@given(num_elements=lengths, ranks=groups, unit=st.integers(1, 7))
def test_hops_are_a_chunk_or_the_whole_and_none_is_empty_or_sent_twice(algorithm, phase, num_elements, ranks, unit):
    hops = getattr(ALGORITHMS[algorithm], phase)(num_elements, ranks, unit)
    pieces = {(0, num_elements), *chunk_bounds(num_elements, len(ranks), unit)}
    assert all(hop.src != hop.dst and hop.start < hop.stop and hop.positions for hop in hops)
    assert all((hop.start, hop.stop) in pieces for hop in hops)
    assert len({hop[:4] for hop in hops}) == len(hops)
    assert all(len(set(hop.positions)) == len(hop.positions) for hop in hops)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "tree"])
def test_one_rank_alone_sends_nothing(algorithm, phase):
    assert getattr(ALGORITHMS[algorithm], phase)(100, (3,)) == ()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_message_of_no_elements_crosses_nothing(algorithm, phase):
    assert getattr(ALGORITHMS[algorithm], phase)(0, (0, 1, 2)) == ()


def test_direct_by_hand():
    """Ranks 6 and 4, in this order, own elements [0, 3) and [3, 5)."""
    assert direct.reduce(5, (6, 4)) == (Hop(6, 4, 3, 5, positions=(0,)), Hop(4, 6, 0, 3, positions=(1,)))
    assert direct.gather(5, (6, 4)) == (Hop(6, 4, 0, 3, positions=(1,)), Hop(4, 6, 3, 5, positions=(0,)))


def test_sender_by_hand():
    assert sender.reduce(5, (6, 4)) == (Hop(6, SWITCH, 0, 5, (0,)), Hop(4, SWITCH, 0, 5, (1,)))
    assert sender.all_gather(5, (6, 4)) == (Hop(6, SWITCH, 0, 3, (0, 1)), Hop(4, SWITCH, 3, 5, (0, 1)))


def test_ring_by_hand():
    """Ranks 5, 6, 7 own elements [0, 2), [2, 4), [4, 6). The sum of the first starts at 6, of the last at 5."""
    first = [Hop(5, 6, 4, 6, (0,)), Hop(6, 7, 0, 2, (1,)), Hop(7, 5, 2, 4, (2,))]
    then = [Hop(5, 6, 2, 4, (2, 0)), Hop(6, 7, 4, 6, (0, 1)), Hop(7, 5, 0, 2, (1, 2))]
    assert ring.reduce(6, (5, 6, 7)) == (*first, *then)
    first = [Hop(5, 6, 0, 2, (1, 2)), Hop(6, 7, 2, 4, (2, 0)), Hop(7, 5, 4, 6, (0, 1))]
    then = [Hop(5, 6, 4, 6, (1,)), Hop(6, 7, 0, 2, (2,)), Hop(7, 5, 2, 4, (0,))]
    assert ring.gather(6, (5, 6, 7)) == (*first, *then)


def test_tree_by_hand():
    """Position 0 above 1 and 2, 1 above 3 and 4."""
    up = [(4, 1, (4,)), (3, 1, (3,)), (2, 0, (2,)), (1, 0, (1, 3, 4))]
    assert tree.reduce(9, (0, 1, 2, 3, 4)) == tuple(Hop(src, dst, 0, 9, below) for src, dst, below in up)
    down = [(0, 1, (1, 3, 4)), (0, 2, (2,)), (1, 3, (3,)), (1, 4, (4,))]
    assert tree.gather(9, (0, 1, 2, 3, 4)) == tuple(Hop(src, dst, 0, 9, below) for src, dst, below in down)


def test_switch_by_hand():
    up = (Hop(6, SWITCH, 0, 5, (0,)), Hop(4, SWITCH, 0, 5, (1,)))
    assert switch.reduce(5, (6, 4)) == up
    assert switch.gather(5, (6, 4)) == (Hop(SWITCH, 6, 0, 5, (0,)), Hop(SWITCH, 4, 0, 5, (1,)))
    assert switch.reduce_scatter(5, (6, 4)) == (*up, Hop(SWITCH, 6, 0, 3, (0, 1)), Hop(SWITCH, 4, 3, 5, (0, 1)))
    up = (Hop(6, SWITCH, 0, 3, (1,)), Hop(4, SWITCH, 3, 5, (0,)))
    assert switch.all_gather(5, (6, 4)) == (*up, Hop(SWITCH, 6, 3, 5, (0,)), Hop(SWITCH, 4, 0, 3, (1,)))


def test_what_crosses_no_link():
    """A share of 1 / R of the contributions in direct and ring, the root's in tree, nothing by way of a switch."""
    at_risk = {"sender": 16, "direct": 12, "ring": 12, "tree": 12, "switch": 16}
    for algorithm, quarters in at_risk.items():
        assert len(crossings(ALGORITHMS[algorithm].reduce(400, (0, 1, 2, 3)))) == 100 * quarters


def test_algorithms_are_found_by_name():
    assert set(ALGORITHMS) == {"sender", "direct", "ring", "tree", "switch"}
    for name, module in (("sender", sender), ("direct", direct), ("ring", ring), ("tree", tree), ("switch", switch)):
        assert algorithm_named(name) is ALGORITHMS[name] is module


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    known = "direct, ring, sender, switch, tree"
    with pytest.raises(ValueError, match=rf"^algorithm = 'rign' is unknown: choose one of {known}$"):
        algorithm_named("rign")
