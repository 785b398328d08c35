"""Counter-based random streams."""

import hashlib
import itertools
from statistics import NormalDist

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.random_numbers import LARGEST_BLOCK, LONGEST_GAP, Normals, Stream, geometric
from tests.network.loss_statistics import assert_within, batch_means, partitions, reproducible

KEY = (0, "training", 0, "tp", 0, 1, "gaps")


@reproducible
@given(edges=partitions(300))
def test_numbers_do_not_depend_on_how_many_are_read_at_once(edges):
    for take in (lambda: Stream(KEY).uniforms, lambda: Normals(KEY).take):
        one, whole = take(), take()(300)
        pieces = [one(stop - start) for start, stop in itertools.pairwise(edges)]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_array_equal(Normals(KEY, edges[1]).take(9), Normals(KEY).take(309)[edges[1] : edges[1] + 9])


@reproducible
@given(positions=st.lists(st.integers(0, 290), min_size=1, max_size=6))
def test_seek_makes_any_number_the_next_one(positions):
    """Also backwards, and to positions inside a counter's four words."""
    numbers = Stream(KEY).uniforms(300)
    stream = Stream(KEY)
    for position in positions:
        stream.seek(position)
        np.testing.assert_array_equal(stream.uniforms(10), numbers[position : position + 10])


def test_seek_reaches_far_positions_at_once():
    """Number 4 c is the first word of Philox's counter c + 1, however far c is."""
    far = 10**15
    stream = Stream(KEY)
    stream.seek(4 * far + 2)
    key = np.frombuffer(hashlib.blake2b(repr(KEY).encode(), digest_size=16).digest(), dtype=np.uint64)
    words = np.random.Philox(key=key, counter=far).random_raw(4)
    np.testing.assert_array_equal(stream.uniforms(2), (words[2:] >> np.uint64(12)) * 2.0**-52)


def test_numbers_stay_the_same_across_versions():
    """Recorded runs can be repeated only as long as these numbers stand."""
    assert [float(number).hex() for number in Stream(KEY).uniforms(3)] == [
        "0x1.03c1356f6b788p-1",
        "0x1.8bf39cbe30c50p-1",
        "0x1.2e677dc897950p-1",
    ]


def test_numbers_are_uniform_and_uncorrelated():
    numbers = Stream(KEY).uniforms(1_000_000)
    assert 0 <= numbers.min() < numbers.max() < 1
    np.testing.assert_array_equal(numbers * 2.0**52, np.floor(numbers * 2.0**52))
    for decile in range(10):
        assert_within(batch_means(np.floor(numbers * 10) == decile), 0.1, f"share of decile {decile}")
    for lag in (1, 2, 3, 4):
        products = (numbers[:-lag] - 0.5) * (numbers[lag:] - 0.5)
        assert_within(batch_means(products * 12), 0, f"autocorrelation at lag {lag}")


def test_every_key_names_a_stream_of_its_own():
    """Parts of a key are neither joined nor confused with their text, and each part counts."""
    others = [(*KEY[:place], other, *KEY[place + 1 :]) for place, other in enumerate((1, "evaluation", 1, "dp", 1, -1))]
    keys = [KEY, *others, KEY[:-1], ("0", *KEY[1:]), (*KEY[:-1], "good", "gaps"), (1, 23), (12, 3), (123,), ()]
    assert len({Stream(key).uniforms(1)[0] for key in keys}) == len(keys)


def test_normals_are_the_uniforms_inverted():
    """At the middle of each step of 2^-52, so that none is infinite."""
    uniforms = Stream(KEY).uniforms(1000)
    numbers = Normals(KEY).take(1000)
    inverse = NormalDist().inv_cdf
    np.testing.assert_allclose(numbers, [inverse(u + 2.0**-53) for u in uniforms], rtol=1e-9)
    assert np.isfinite(Normals(KEY).take(10**6)).all()


@reproducible
@given(probability=st.floats(1e-6, 1), uniform=st.floats(0, 1, exclude_max=True, width=32))
def test_geometric_inverts_the_distribution_function(probability, uniform):
    """The smallest n with P(X <= n) = 1 - (1 - p)^n above the uniform number, to rounding."""
    trials = int(geometric(probability, np.array([uniform]))[0])
    assert trials >= 1
    assert 1 - (1 - probability) ** trials >= uniform - 1e-9
    assert 1 - (1 - probability) ** (trials - 1) <= uniform + 1e-9


def test_the_longest_gaps_of_the_rarest_losses_stay_inside_int64():
    gaps = geometric(1e-300, np.full(LARGEST_BLOCK, 1 - 2.0**-52))
    assert (gaps == LONGEST_GAP + 1).all()
    assert 0 < np.cumsum(gaps)[-1] < 2**62
