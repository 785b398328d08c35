"""Figures of a measured network's losses."""

import numpy as np
import pytest

from lossyprobe.fitting import fit_family, goodness
from lossyprobe.likelihood import FAMILIES
from lossytp.network import Trace
from paper.collectives import loss_over_packets, run_lengths


def test_loss_rates_along_the_flows():
    flow = Trace.from_indicators([0] * 500 + [1] * 500)
    (ax,) = loss_over_packets([flow, Trace.from_indicators([0, 1, 0])]).axes
    first, second = ax.patches
    assert first.get_data().values.tolist() == [0] * 50 + [1] * 50
    assert second.get_data().values.tolist() == [0, 1, 0]


def test_shares_of_runs_by_length():
    flow = Trace.from_indicators(([0] * 7 + [1, 0, 1, 1, 1]) * 20)
    fitted = goodness(fit_family(FAMILIES["simple Gilbert"], [flow]), [flow])
    bursts, gaps = run_lengths(fitted).axes
    recorded = bursts.lines[1]
    assert recorded.get_label() == "recorded"
    np.testing.assert_array_equal(recorded.get_xdata()[:3], [1, 1, 3])
    np.testing.assert_allclose(recorded.get_ydata()[:3], [1, 1, 0.5])
    assert gaps.lines[1].get_ydata()[2] == pytest.approx(19 / 39)  # of 39 gaps, those of 7 packets
    assert bursts.get_title() == f"bursts, p = {fitted.bursts.p:.2f}"


def test_runs_of_a_trace_without_losses_are_drawn():
    flow = Trace.from_indicators([0, 0, 0])
    bursts, gaps = run_lengths(goodness(fit_family(FAMILIES["Bernoulli"], [flow]), [flow])).axes
    assert [list(line.get_ydata()) for line in (bursts.lines[1], gaps.lines[1])] == [[1.0, 0.5]] * 2, "no run"
