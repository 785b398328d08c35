"""Flows as blocks of a gap and a loss, and as runs."""

import numpy as np
import pytest

from lossytp.probe import fitting as runs
from tests.probe.fitting.recordings import bits

FLOWS = [bits("0011010"), bits("1"), bits("000"), bits("111")]


def test_blocks_are_gaps_that_end_with_a_loss_or_with_the_flow():
    blocks = runs.Blocks.of(FLOWS)
    expected = [(2, 0), (0, 0), (1, 0), (1, 1), (0, 0), (0, 1), (3, 1), (0, 0), (0, 0), (0, 0), (0, 1)]
    assert list(zip(blocks.gaps.tolist(), blocks.ends.astype(int).tolist(), strict=True)) == expected


def test_runs_and_totals_by_hand():
    assert runs.burst_lengths(FLOWS).tolist() == [2, 1, 1, 3]
    assert runs.gap_lengths(FLOWS).tolist() == [1]  # the runs at the ends of a flow are no gaps
    assert (runs.num_packets(FLOWS), runs.num_lost(FLOWS)) == (14, 7)


def test_no_loss_has_no_runs():
    assert len(runs.burst_lengths([bits("000")])) == len(runs.gap_lengths([bits("000")])) == 0


def test_no_flow_is_refused():
    with pytest.raises(ValueError, match=r"^flows is empty: give at least one recorded flow$"):
        runs.Blocks.of([])


def test_blocks_cost_what_the_losses_cost():
    flow = bits("0" * 10**5 + "1")
    assert len(runs.Blocks.of([flow]).gaps) == 2
    np.testing.assert_array_equal(runs.Blocks.of([flow]).gaps, [10**5, 0])
