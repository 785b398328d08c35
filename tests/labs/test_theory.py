"""Expected squared errors: against every outcome of every hop, walked through as the messages would, and by hand.

The walk knows places and what they hold; the theory knows contributions and the hops they cross.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import nbinom

from lossytp.network.lossy_network import CommConfig
from lossytp.network.repairs import Fec
from lossytp.network.routes import ALGORITHMS, SWITCH
from notebooks import theory
from tests.network.loss_statistics import reproducible


def wired(algorithm, repair, reliable_gather=True):
    return CommConfig.named(algorithm=algorithm, repair=repair, reliable_gather=reliable_gather)


def expected_squared_error(algorithm, repair, ranks, loss_rate, coherence=0.0, reliable_gather=True):
    return theory.expected_squared_error(wired(algorithm, repair, reliable_gather), ranks, loss_rate, coherence)


def mean_weights(algorithm, repair, ranks, loss_rate, reliable_gather=True):
    return theory.mean_weights(wired(algorithm, repair, reliable_gather), ranks, loss_rate)


def missing_share(algorithm, repair, ranks, loss_rate, reliable_gather=True):
    return theory.missing_share(wired(algorithm, repair, reliable_gather), ranks, loss_rate)


REPAIRS = ["zero", "rescale", "rescale_counted", "stale", "local", "fec(4, 3)", "hadamard", "retransmit(1)"]
IN_WEIGHTS = ["zero", "rescale", "rescale_counted", "local"]  # whose results are weighted sums of present parts
rates, ranks_ = st.floats(0, 0.95), st.integers(2, 9)


def possible(algorithm, repair, reliable_gather):
    return algorithm != "sender" or (repair != "local" and reliable_gather)


CASES = [case for case in itertools.product(ALGORITHMS, REPAIRS, [True, False]) if possible(*case)]


def walk(reduce, gather, lost, ranks, repair, rate):
    """The parts' weights in each rank's result, (ranks, ranks), when the hops numbered in `lost` deliver nothing."""
    weight = 1 / (1 - rate) if repair == "rescale" else 1.0
    own = np.eye(ranks)
    holds = {rank: own[rank] for rank in range(ranks)} | {SWITCH: np.zeros(ranks)}
    number = 0
    for number, hop in enumerate(reduce, 1):
        if number - 1 not in lost:
            holds[hop.dst] = holds[hop.dst] + weight * holds[hop.src]
        elif repair == "local" and hop.dst != SWITCH:
            holds[hop.dst] = holds[hop.dst] + own[hop.dst]
    root = reduce[-1].dst
    total = holds[root]
    if repair == "rescale_counted" and total.any():
        total = total * ranks / np.count_nonzero(total)
    if not gather:
        return np.tile(total, (ranks, 1))
    handed = {root: total}
    for position, hop in enumerate(gather, number):
        if position not in lost and hop.src in handed:
            handed[hop.dst] = weight * handed[hop.src]
    return np.array([handed.get(rank, own[rank] if repair == "local" else np.zeros(ranks)) for rank in range(ranks)])


def sender_walk(lost, ranks, repair, rate):
    """As `walk`, where a rank's part is lost for its owner as well."""
    arrived = np.array([rank not in lost for rank in range(ranks)], float)
    scale = {"rescale": 1 / (1 - rate), "rescale_counted": ranks / max(arrived.sum(), 1)}.get(repair, 1.0)
    return np.tile(arrived * scale, (ranks, 1))


def outcomes(algorithm, repair, ranks, rate, reliable_gather):
    """For each chunk and each outcome: its probability, and the weights in each rank's result."""
    routes, everyone = ALGORITHMS[algorithm], tuple(range(ranks))
    for chunk in range(ranks):
        reduce = [hop for hop in routes.reduce(ranks, everyone) if hop.start <= chunk < hop.stop]
        gather = [hop for hop in routes.gather(ranks, everyone) if hop.start <= chunk < hop.stop]
        gather = [] if reliable_gather else gather
        hops = len(reduce) + len(gather)
        for losses in itertools.product([False, True], repeat=hops):
            lost = {number for number, is_lost in enumerate(losses) if is_lost}
            chance = rate ** len(lost) * (1 - rate) ** (hops - len(lost))
            if algorithm == "sender":
                yield chunk, chance, sender_walk(lost, ranks, repair, rate)
            else:
                yield chunk, chance, walk(reduce, gather, lost, ranks, repair, rate)


@pytest.mark.parametrize(("algorithm", "repair", "reliable_gather"), [case for case in CASES if case[1] in IN_WEIGHTS])
def test_equals_the_mean_over_every_outcome_of_every_hop(algorithm, repair, reliable_gather):
    for ranks, rate in [(2, 0.3), (3, 0.2), (4, 0.4), (5, 0.35)] if reliable_gather else [(2, 0.3), (3, 0.2), (4, 0.4)]:
        case = algorithm, repair, ranks, rate
        squares, means = np.zeros((ranks, ranks)), np.zeros((ranks, ranks))
        for chunk, chance, weights in outcomes(*case, reliable_gather):
            squares += chance * (weights - 1).T @ (weights - 1) / ranks**2
            means[chunk] += chance * weights.mean(0)
        assert mean_weights(*case, reliable_gather) == pytest.approx(means, rel=1e-9)
        for coherence in (0.0, 0.5, 1.0, -0.9 / (ranks - 1)):
            products = np.full((ranks, ranks), coherence) + (1 - coherence) * np.eye(ranks)
            expected = (squares * products).sum() / products.sum()
            assert expected_squared_error(*case, coherence, reliable_gather) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("algorithm", ["direct", "ring", "tree", "switch"])
def test_sequence_parallel_sums_travel_as_reduce_scatters_do(algorithm):
    ranks, rate = 4, 0.3
    routes = ALGORITHMS[algorithm].reduce_scatter(ranks, tuple(range(ranks)))
    lost = 0.0  # of each part, expected: with coherence 0, only these probabilities count
    for chunk in range(ranks):
        on_way = [hop for hop in routes if hop.start <= chunk < hop.stop]
        for rank in range(ranks):
            lost += 1 - (1 - rate) ** sum(rank in hop.positions for hop in on_way)
    comm = CommConfig.named(algorithm=algorithm, sequence_parallel=True)
    assert theory.expected_squared_error(comm, ranks, rate) == pytest.approx(lost / ranks**2)


@settings(reproducible, max_examples=30)
@given(ranks=ranks_, rate=rates, share=st.floats(0.01, 1))
def test_direct_in_closed_form(ranks, rate, share):
    coherence = -1 / (ranks - 1) + share * (1 + 1 / (ranks - 1))
    others, pairs, delivered = ranks - 1, (ranks - 1) * (ranks - 2), 1 - rate
    energy = ranks + coherence * ranks * others
    expected = {
        "zero": others * rate + coherence * pairs * rate**2,
        "hadamard": others * rate + coherence * pairs * rate**2,
        "retransmit(2)": others * rate**3 + coherence * pairs * rate**6,
        "rescale": others * rate / delivered,
        "stale": 2 * others * rate + 2 * coherence * pairs * rate**2 / (1 + rate),
        "local": (1 - coherence) * (2 * others * rate + pairs * rate**2),
    }
    for repair, error in expected.items():
        result = expected_squared_error("direct", repair, ranks, rate, coherence)
        assert result * energy == pytest.approx(error, rel=1e-6, abs=1e-9)


@settings(reproducible, max_examples=30)
@given(ranks=ranks_, rate=rates)
def test_counted_weights_in_closed_form(ranks, rate):
    own = (1 - rate**ranks) / (1 - rate)
    expected = np.full((ranks, ranks), (ranks - own) / (ranks - 1))
    np.fill_diagonal(expected, own)
    assert mean_weights("direct", "rescale_counted", ranks, rate) == pytest.approx(expected)
    for algorithm in ("sender", "switch"):
        assert mean_weights(algorithm, "rescale_counted", ranks, rate) == pytest.approx(
            np.full((ranks, ranks), 1 - rate**ranks)
        )


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_ages_of_independent_ways_are_equal_as_often_as_negative_binomial_numbers_are(rate):
    ages = np.arange(3000)
    for one, other in itertools.product(range(8), repeat=2):
        one_law, other_law = (nbinom.pmf(ages, n, 1 - rate) if n else ages == 0 for n in (one, other))
        result = theory.same_age(np.array([[float(one)]]), np.array([[float(other)]]), rate)
        assert result.item() == pytest.approx((one_law * other_law).sum(), rel=1e-9)


@pytest.mark.parametrize(("algorithm", "repair", "reliable_gather"), CASES)
def test_without_losses_there_is_no_error_and_with_more_losses_no_less(algorithm, repair, reliable_gather):
    for ranks in range(1, 9):
        for coherence in (0.0, 0.5):
            case = (algorithm, repair, ranks)
            errors = [
                expected_squared_error(*case, rate, coherence, reliable_gather) for rate in (0, 1e-6, 0.01, 0.1, 0.3)
            ]
            assert errors[0] == 0
            if ranks > 1:
                assert errors[1] > 0
                assert errors == sorted(errors)
    assert mean_weights(algorithm, repair, 4, 0.0, reliable_gather) == pytest.approx(np.ones((4, 4)))


def test_links_that_deliver_nothing():
    """An owner keeps its own part, and has nothing to scale or to put in, but its own again."""
    for repair in ("zero", "rescale", "stale", "hadamard", "fec(4, 3)", "retransmit(3)"):
        assert expected_squared_error("direct", repair, 4, 1.0) == pytest.approx(3 / 4)
        assert mean_weights("direct", repair, 4, 1.0) == pytest.approx(np.eye(4))
        assert expected_squared_error("switch", repair, 4, 1.0, 0.5) == pytest.approx(1)
    for repair in ("rescale_counted", "local"):
        assert mean_weights("direct", repair, 4, 1.0) == pytest.approx(4 * np.eye(4))
    assert expected_squared_error("direct", "local", 4, 1.0, coherence=1.0) == pytest.approx(0)


@settings(reproducible, max_examples=30)
@given(ranks=ranks_, rate=rates)
def test_share_of_contributions_missing(ranks, rate):
    at_risk = (ranks - 1) / ranks
    for repair in ("zero", "rescale", "rescale_counted", "stale", "local", "hadamard"):
        assert missing_share("direct", repair, ranks, rate) == pytest.approx(at_risk * rate)
    remaining = Fec(10, 8).missing_rate(rate)
    assert missing_share("direct", "fec(10, 8)", ranks, rate) == pytest.approx(at_risk * remaining, abs=1e-12)
    assert missing_share("sender", "retransmit(1)", ranks, rate) == pytest.approx(rate**2, abs=1e-12)
    # up and down, each of a switch's links loses
    assert missing_share("switch", "zero", ranks, rate, reliable_gather=False) == pytest.approx(1 - (1 - rate) ** 2)
    # in a ring, the part j hops from the owner needs j hops, and the sum j hops to the j-th rank
    delivered = [(1 - rate) ** hops for hops in range(ranks)]
    assert missing_share("ring", "zero", ranks, rate) == pytest.approx(1 - np.mean(delivered))
    lossy = missing_share("ring", "zero", ranks, rate, reliable_gather=False)
    assert lossy == pytest.approx(1 - np.mean(delivered) ** 2)


def test_sixteen_ranks_are_counted_and_many_more_have_all_other_repairs():
    assert mean_weights("ring", "rescale_counted", 16, 0.1).sum() == pytest.approx(16 * 16)
    for repair in ("zero", "stale", "local"):
        assert 0 < expected_squared_error("ring", repair, 40, 0.01) < 1
