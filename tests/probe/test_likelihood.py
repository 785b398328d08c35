"""The likelihood of recorded flows: block by block as packet by packet, its families, starts and maximum."""

import numpy as np
import pytest

from lossyprobe.likelihood import FAMILIES, Likelihood, burst_lengths, gap_lengths, num_lost, num_packets
from lossytp.network import Trace
from tests.probe.recordings import TRUTHS, VALUES, bits, log_likelihood, recorded

SHORT = (400, 3, 1, 200, 30, 800)  # packets of many flows, whose starts weigh
FLOWS = {
    "one packet": [bits("0")],
    "one loss": [bits("1")],
    "few packets": [bits("010")],
    "none lost": [bits("0" * 50), bits("0")],
    "all lost": [bits("111"), bits("1")],
    "several flows": [*recorded(TRUTHS["Gilbert-Elliott"], 900, 1, 700, 2), bits("1"), bits("0110")],
}


def test_runs_and_totals_by_hand():
    flows = [bits("0011010"), bits("1"), bits("000"), bits("111")]
    assert burst_lengths(flows).tolist() == [2, 1, 1, 3]
    assert gap_lengths(flows).tolist() == [1]  # the runs at the ends of a flow are no gaps
    assert (num_packets(flows), num_lost(flows)) == (14, 7)
    assert len(burst_lengths([bits("000")])) == len(gap_lengths([bits("000")])) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chain_has_the_loss_rate_and_autocorrelation_of_its_process(name):
    values = np.array(VALUES[name])
    process, chain = FAMILIES[name].process(values), FAMILIES[name].chain(values)
    rate = chain.start @ chain.loss
    assert rate == pytest.approx(process.loss_rate)
    np.testing.assert_allclose(chain.start @ chain.transition, chain.start, atol=1e-12)
    for lag in (1, 2, 7):
        steps = np.linalg.matrix_power(chain.transition, lag)
        both = (chain.start * chain.loss) @ steps @ chain.loss
        assert (both - rate**2) / (rate * (1 - rate)) == pytest.approx(process.autocorrelation(lag), abs=1e-12)


@pytest.mark.parametrize("flows", FLOWS)
@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_give_the_likelihood_of_the_packet_by_packet_reference(name, flows):
    values = np.array(VALUES[name])
    found = Likelihood(FAMILIES[name], FLOWS[flows]).at(values)
    assert found == pytest.approx(log_likelihood(FAMILIES[name].chain(values), FLOWS[flows]), rel=1e-9)


def test_long_gaps_neither_vanish_nor_overflow():
    """A gap of 10^9 packets has a likelihood of exp(-10^7), and costs no more than a short one."""
    values = np.array([0.01, 0.06, 0.6, 0.02])
    chain, gap = FAMILIES["Gilbert-Elliott"].chain(values), 10**9
    flow = Trace(lost=np.array([gap]), num_packets=gap + 1)
    eigenvalues, vectors = np.linalg.eig((1 - chain.loss)[:, None] * chain.transition)
    dominant = int(eigenvalues.argmax())
    left = np.linalg.inv(vectors)[dominant]
    exact = gap * np.log(eigenvalues[dominant]) + np.log(chain.start @ vectors[:, dominant] * (left @ chain.loss))
    assert Likelihood(FAMILIES["Gilbert-Elliott"], [flow]).at(values) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_top_is_flat_and_above_the_truth(name):
    flows = recorded(TRUTHS[name], 50_000, *SHORT)
    likelihood = Likelihood(FAMILIES[name], flows)
    top = likelihood.maximise(flows)
    truth = likelihood.at(np.array([getattr(TRUTHS[name], each) for each in FAMILIES[name].parameters]))
    assert truth - 1e-6 <= likelihood.at(top) < truth + 12  # chi2(5) / 2 is below 12 but for 1 in 10^4
    assert np.abs(likelihood.gradient(likelihood.odds(top))).max() < 0.5  # expected events
