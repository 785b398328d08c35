"""The passes over blocks compute what passes over packets compute."""

import numpy as np
import pytest

from lossytp.network import Trace
from lossytp.probe.fitting import FAMILIES, Blocks, Passes, powers
from tests.probe.fitting.recordings import TRUTHS, VALUES, bits, forward_backward, recorded

FLOWS = {
    "one packet": [bits("0")],
    "one loss": [bits("1")],
    "few packets": [bits("010")],
    "none lost": [bits("0" * 50), bits("0")],
    "all lost": [bits("111"), bits("1")],
    "several flows": [*recorded(TRUTHS["Gilbert-Elliott"], 900, 1, 700, 2), bits("1"), bits("0110")],
}


@pytest.mark.parametrize("flows", FLOWS)
@pytest.mark.parametrize("name", FAMILIES)
def test_passes_equal_the_packet_by_packet_reference(name, flows):
    chain = FAMILIES[name].chain(np.array(VALUES[name]))
    expected = Passes(Blocks.of(FLOWS[flows])).expected(chain)
    log_likelihood, counts, starts = forward_backward(chain, FLOWS[flows])
    assert expected.log_likelihood == pytest.approx(log_likelihood, rel=1e-9)
    assert Passes(Blocks.of(FLOWS[flows])).log_likelihood(chain) == pytest.approx(log_likelihood, rel=1e-9)
    np.testing.assert_allclose(expected.received, counts[0], atol=1e-9)
    np.testing.assert_allclose(expected.lost, counts[1], atol=1e-9)
    np.testing.assert_allclose(expected.starts, starts, atol=1e-9)


def test_long_gaps_neither_vanish_nor_overflow():
    """A gap of 10^9 packets has a likelihood of exp(-10^7), and costs no more than a short one."""
    chain = FAMILIES["Gilbert-Elliott"].chain(np.array([0.01, 0.06, 0.6, 0.02]))
    gap = 10**9
    flow = Trace(lost=np.array([gap]), num_packets=gap + 1)
    expected = Passes(Blocks.of([flow])).expected(chain)
    values, vectors = np.linalg.eig(chain.received)
    dominant = int(values.argmax())
    left = np.linalg.inv(vectors)[dominant]
    exact = gap * np.log(values[dominant]) + np.log(chain.start @ vectors[:, dominant] * (left @ chain.loss))
    assert expected.log_likelihood == pytest.approx(exact, rel=1e-12)
    assert expected.transitions.sum() == pytest.approx(gap + 1)


def test_powers_of_a_matrix():
    base = np.array([[0.5, 0.2], [0.1, 0.7]])
    exponents = np.array([[0, 1], [2, 13]])
    expected = [[np.linalg.matrix_power(base, each) for each in row] for row in exponents]
    np.testing.assert_allclose(powers(base, exponents), expected)
