"""Packets, algorithms as routes, and what messages lose over their hops."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network import ALGORITHMS, SWITCH, LossyNetwork
from lossytp.network.repairs import repair_named
from lossytp.network.routes import MOST, Hop, Wire, algorithm_named, check_links_within, checked_link, chunk_bounds
from lossytp.network.routes import RING as ring
from tests.network.loss_statistics import reproducible
from tests.network.lossy_traffic import EVERYTHING, TWO_FLOATS, packets_of

# Packets and chunks


@pytest.mark.parametrize(("itemsize", "elements"), [(2, 728), (4, 364), (8, 182)])
def test_the_default_packet_carries_1456_bytes_of_payload(itemsize, elements):
    """MTU 1500 less IP 20, UDP 8, and 16 for key, sequence and offset."""
    assert Wire() == Wire(mtu_bytes=1500, header_bytes=44)
    assert Wire().elements_per_packet(itemsize) == elements


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *(("mtu_bytes", (51, 0, 1500.5, float("nan"), "1500", None, 2**66)), ("header_bytes", ("44", 0.5, -1))),
        ("elements", (0, -1, 1.5, True, 2**66)),
    ],
)
def test_packets_that_cannot_be_are_refused(name, values):
    assert Wire(mtu_bytes=52).elements_per_packet(8) == Wire(elements=1).elements_per_packet(4) == 1
    assert Wire(mtu_bytes=MOST, elements=MOST).elements == MOST
    for value in values:
        with pytest.raises(ValueError, match=name):
            Wire(**{name: value})


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


# Algorithms

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
    if algorithm in ("direct", "ring") or (algorithm, phase) == ("sender", "reduce_scatter"):
        phase = {"reduce_scatter": "reduce", "all_gather": "gather"}.get(phase, phase)
    up, down = to_the_root(position), to_the_root(position)[::-1]
    alone = position == owner
    return {
        ("sender", "reduce"): [position, SWITCH],
        ("sender", "gather"): [],
        ("sender", "all_gather"): [owner, SWITCH],
        ("direct", "reduce"): [] if alone else [position, owner],
        ("direct", "gather"): [] if alone else [owner, position],
        ("ring", "reduce"): round_the_ring(position, owner, size),
        ("ring", "gather"): round_the_ring(owner, position, size),
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
    pieces = {(0, num_elements), *chunks}
    assert all(hop.src != hop.dst and hop.start < hop.stop and hop.positions for hop in hops)
    assert all((hop.start, hop.stop) in pieces for hop in hops)
    assert len({hop[:4] for hop in hops}) == len(hops), "none is sent twice"
    assert all(len(set(hop.positions)) == len(hop.positions) for hop in hops)


def test_ring_by_hand():
    """Ranks 5, 6, 7 own elements [0, 2), [2, 4), [4, 6). The sum of the first starts at 6, of the last at 5."""
    first = [Hop(5, 6, 4, 6, (0,)), Hop(6, 7, 0, 2, (1,)), Hop(7, 5, 2, 4, (2,))]
    then = [Hop(5, 6, 2, 4, (2, 0)), Hop(6, 7, 4, 6, (0, 1)), Hop(7, 5, 0, 2, (1, 2))]
    assert ring.reduce(6, (5, 6, 7)) == (*first, *then)
    first = [Hop(5, 6, 0, 2, (1, 2)), Hop(6, 7, 2, 4, (2, 0)), Hop(7, 5, 4, 6, (0, 1))]
    then = [Hop(5, 6, 4, 6, (1,)), Hop(6, 7, 0, 2, (2,)), Hop(7, 5, 2, 4, (0,))]
    assert ring.gather(6, (5, 6, 7)) == (*first, *then)


# Names


def test_algorithms_are_found_by_name_and_send_nothing_of_nothing():
    assert set(ALGORITHMS) == {"sender", "direct", "ring", "tree", "switch"}
    for name, algorithm in ALGORITHMS.items():
        assert algorithm_named(name) is algorithm is pickle.loads(pickle.dumps(algorithm))
        assert all(getattr(algorithm, phase)(0, (0, 1, 2)) == () for phase in PHASES)
        assert name in ("sender", "switch") or all(getattr(algorithm, phase)(100, (3,)) == () for phase in PHASES)
    with pytest.raises(ValueError, match="algorithm"):
        algorithm_named("rign")


def test_links_are_pairs_of_ranks():
    link = checked_link((np.int64(0), np.int32(-1)))
    assert link == (0, -1)
    assert [type(end) for end in link] == [int, int]
    for key in ("0>1", (0,), (0, 1, 2), (), (0, 1.0), ("0", "1"), [0, 1], 5, None, (0, 0), (-1, -1), (0, -2)):
        with pytest.raises(ValueError, match="link"):
            checked_link(key)
    check_links_within([(0, 3), (3, -1), (-1, 2)], 4)
    for link in ((0, 4), (99, 1), (-1, 4)):
        with pytest.raises(ValueError, match="link"):
            check_links_within([(0, 3), link], 4)


# Messages over hops


def test_a_repair_s_packets_are_on_the_wire_and_counted():
    """Two packets of the message and one of parity; sent again twice; half a block of padding."""
    hops = (Hop(0, 1, 0, 4, positions=(0,)),)
    for repair, packets, lost, extra, lacks in (
        ("zero", 2, 2, 0, [0, 1]),
        ("fec(3, 2)", 3, 3, 1, [0, 1]),
        ("retransmit(2)", 6, 6, 4, [0, 1]),
    ):
        network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
        assert packets_of(network.send(hops, 4, repair=repair_named(repair))) == [lacks]
        row = network.counters.rows()[0]
        assert [row[name] for name in ("packets", "lost", "extra", "missing")] == [packets, lost, extra, 2]
    network = LossyNetwork(EVERYTHING, wire=TWO_FLOATS)
    network.send((Hop(0, 1, 0, 9, positions=(0,)),), 4, repair=repair_named("hadamard(4)"))
    total = network.counters.summary("training")
    assert (total["packets"], total["extra"]) == (6, 1), "twelve coefficients of nine elements"
