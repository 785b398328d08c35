import numpy as np
import pytest

from lossytp.network import Bernoulli, GilbertElliott, LossProcess
from lossytp.network.traces import FlowTrace, ProbeTrace
from lossytp.probe.measure import loss_rate, summary_lines


def coverage(process: LossProcess, packets: int, confidence: float = 0.95, links: int = 300) -> float:
    """The share of links on which the interval holds the truth."""
    holds = 0
    for link in range(links):
        lost = np.zeros(packets, np.bool_)
        lost[process.losses((0, "coverage", 0, link)).take(packets)] = True
        _, low, high = loss_rate(lost, confidence)
        holds += low <= process.loss_rate <= high
    return holds / links


def test_the_interval_holds_the_truth_for_single_losses() -> None:
    for rate in (0.001, 0.05, 0.5):
        assert coverage(Bernoulli(loss_rate=rate), 10_000) > 0.92


def test_the_interval_holds_the_truth_for_bursts() -> None:
    bursts = GilbertElliott.from_loss_and_burst(loss_rate=0.05, mean_burst_packets=20)
    assert coverage(bursts, 40_000) > 0.92


def test_single_losses_have_wilson_s_interval() -> None:
    lost = np.zeros(10_000, np.bool_)
    lost[::100] = True  # as even as can be: no more variance than independent losses have
    rate, low, high = loss_rate(lost)
    assert rate == 0.01
    assert (low, high) == pytest.approx((0.00821, 0.01217), abs=1e-4)


def test_no_loss_bounds_the_rate_from_above() -> None:
    rate, low, high = loss_rate(np.zeros(100_000, np.bool_))
    assert (rate, low) == (0.0, 0.0)
    assert high == pytest.approx(3.94e-5, rel=0.01)
    assert loss_rate(np.ones(10, np.bool_)).high == 1.0
    assert loss_rate(np.ones(1, np.bool_))[::2] == (1.0, 1.0)


def test_a_flow_without_packets_has_no_rate() -> None:
    with pytest.raises(ValueError, match="0 packets has no loss rate"):
        loss_rate(np.zeros(0, np.bool_))


def test_a_summary_says_what_was_measured() -> None:
    lost = np.zeros(1000, np.bool_)
    lost[[1, 2, 5]] = True
    delay_s = np.where(lost, np.nan, 1e-3)
    flow = FlowTrace(
        lost=lost, sent_s=np.arange(1000) * 1e-2, delay_s=delay_s, src="a", dst="b", rate_packets_per_s=100.0
    )
    text = "\n".join(summary_lines(ProbeTrace(flows={0: flow}, clocks="different", own_losses=2)))
    assert "flow 0, a to b: 1000 packets at 100/s of 100/s" in text
    assert "lost 3: 0.300% (95% interval 0." in text
    assert "bursts by length: 1: 1, 2: 1; mean 1.50 packets" in text
    assert "delay in ms: 50% within 1.000, 90% within 1.000, 99% within 1.000, 99.9% within 1.000" in text
    assert "clocks differ" in text
    assert "2 of the lost packets reached a machine that was too slow" in text
    assert "WARNING" not in text


def test_an_imported_trace_that_lost_most_packets_is_doubted() -> None:
    lost = np.array([True, True, False])
    assert [line for line in summary_lines(ProbeTrace(flows={0: FlowTrace(lost=lost)})) if "WARNING: 66.7%" in line]
    assert not [line for line in summary_lines(ProbeTrace(flows={0: FlowTrace(lost=~lost)})) if "WARNING" in line]


def test_names_from_a_file_reach_the_terminal_without_escapes() -> None:
    flow = FlowTrace(lost=np.zeros(3, np.bool_), src="\x1b[2J\nflow 1, x", dst="long" * 10**4)
    first = next(summary_lines(ProbeTrace(flows={0: flow})))
    assert first.isprintable()
    assert len(first) < 1000
    assert first.startswith(r"flow 0, \x1b[2J\nflow 1, x to longlong")


def test_a_trace_that_ended_early_says_so() -> None:
    flows = {0: FlowTrace(lost=np.zeros(10, np.bool_))}
    assert [line for line in summary_lines(ProbeTrace(flows=flows, complete=False)) if "ended early" in line]
    assert not [line for line in summary_lines(ProbeTrace(flows=flows)) if "ended early" in line]


def test_a_summary_of_losses_alone_leaves_times_out() -> None:
    lines = list(summary_lines(ProbeTrace(flows={0: FlowTrace(lost=np.zeros(10, np.bool_))})))
    assert lines[0] == "flow 0, 0 to 1: 10 packets"
    assert len(lines) == 2
