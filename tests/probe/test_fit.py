"""The command that fits loss processes to a trace."""

import re

import numpy as np
import pytest

from lossytp.network import GilbertElliott, Trace, loss_process_named
from lossytp.probe import fit
from lossytp.probe.recorded import flows_of, read
from tests.probe.traces import trace_file

TRUTH = GilbertElliott(p_good_to_bad=0.01, p_bad_to_good=0.1, loss_bad=0.5, loss_good=0.002)


def simulated(length, seed):
    return np.isin(np.arange(length), TRUTH.losses((seed, "test")).take(length))


def test_prints_the_chosen_fit_as_netem_and_as_a_loss_type(tmp_path, capsys):
    path = trace_file(tmp_path, simulated(20_000, 1), simulated(20_000, 2))
    fit.main([str(path)])
    lines = capsys.readouterr().out
    assert "chosen: Gilbert-Elliott" in lines
    shown = float(re.search(r"p_bad_to_good +([\d.]+)", lines)[1])
    assert shown == pytest.approx(0.1, rel=0.2)
    netem = re.search(r"tc qdisc add dev DEVICE root netem (.*)", lines)[1]
    by_name, replayed = (loss_process_named(text) for text in re.findall('--loss_type "(.*)"', lines))
    assert by_name.to_netem() == netem
    assert by_name.loss_rate == pytest.approx(TRUTH.loss_rate, rel=0.1)
    assert isinstance(replayed, Trace)
    assert "does not describe" not in lines
    assert "at the same time" not in lines


def test_says_when_flows_lose_together(tmp_path, capsys):
    lost = simulated(5_000, 1)
    fit.main([str(trace_file(tmp_path, lost, lost))])
    assert "flows lose packets at the same time (correlation 1.00)" in capsys.readouterr().out


def test_says_when_no_family_describes_the_trace(tmp_path, capsys):
    """Bursts of exactly 7 packets every 100."""
    fit.main([str(trace_file(tmp_path, ([0] * 93 + [1] * 7) * 100))])
    assert "the fit does not describe the trace: replay the trace itself" in capsys.readouterr().out


@pytest.mark.parametrize("lost", [[0, 0, 0], [1, 1, 1], [0, 1, 0]])
def test_small_and_unvaried_traces_are_fitted(tmp_path, capsys, lost):
    fit.main([str(trace_file(tmp_path, lost))])
    assert "chosen: Bernoulli; the 95 % intervals, by Clopper and Pearson, assume" in capsys.readouterr().out


def test_flows_are_independent_and_empty_ones_left_out(tmp_path):
    flows = flows_of(read(trace_file(tmp_path, [0, 1], [], [1])))
    assert [(flow.lost.tolist(), flow.num_packets) for flow in flows] == [([1], 2), ([0], 1)]


def test_no_packet_no_trace_and_no_word_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"trace\.parquet holds no packets: measure again$"):
        fit.main([str(trace_file(tmp_path, []))])
    (tmp_path / "a.txt").write_text("01")
    with pytest.raises(ValueError, match=r"is not a \.parquet file: convert it with python -m lossytp\.probe import"):
        fit.main([str(tmp_path / "a.txt")])
    with pytest.raises(ValueError, match="No such file"):
        fit.main([str(tmp_path / "b.parquet")])
    with pytest.raises(ValueError, match=r"^--trace is missing: name the file first$"):
        fit.main([])


def test_a_truncated_trace_is_refused(tmp_path):
    path = trace_file(tmp_path, [0, 1] * 500)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match="is truncated") as caught:
        fit.main([str(path)])
    assert "\n" not in str(caught.value)
