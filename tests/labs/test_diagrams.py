"""Check what diagrams show: who holds what, and when stages of a pipeline work."""

import numpy as np
import pytest

from notebooks.diagrams import EXAMPLES, SENDS, WEIGHTS, _held, timeline


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("parallelism", SENDS)
def test_ranks_together_hold_all_weights_and_the_batch(parallelism, ranks):
    held = np.stack([_held(parallelism, rank, ranks, 4) for rank in range(ranks)])
    assert (held[:, :4] == WEIGHTS).any(0).all()
    assert (held[:, 4] == EXAMPLES).any(0).all()
    copies = ranks if parallelism == "data parallelism" else 1
    assert ((held[:, :4] == WEIGHTS).sum(0) == copies).all()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (4, 8), (4, 2)])
def test_passes_wait_for_their_input_and_the_bubble_is_gpipes(schedule, stages, microbatches):
    """The bubble's share is (S - 1) / (M + S - 1) (Huang et al., "GPipe", section 2.3)."""
    table = timeline(schedule, stages, microbatches)
    table["end"] = table["start"] + table["time"]
    assert len(table) == 2 * stages * microbatches
    ends = table.set_index(["stage", "direction", "microbatch"])["end"]
    for row in table.itertuples():
        step = -1 if row.direction == "forward" else 1
        assert row.start >= ends.get((row.stage + step, row.direction, row.microbatch), 0)
        if row.direction == "backward":
            assert row.start >= ends[row.stage, "forward", row.microbatch]
    for _, rows in table.sort_values("start").groupby("stage"):
        assert (rows["start"].iloc[1:].to_numpy() >= rows["end"].iloc[:-1].to_numpy()).all()
    idle = 1 - table["time"].sum() / (stages * table["end"].max())
    assert idle == pytest.approx((stages - 1) / (microbatches + stages - 1))
