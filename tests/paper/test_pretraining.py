"""What losses cost in pretraining."""

import math

import numpy as np
import pandas as pd
import pytest

from paper.pretraining import departures, nats_lost, training_curves, turning_points

LOSSY, REPAIRED, HALF = "losses on the way to a sum", "repaired", "no loss in half the steps"
SEEDS = (0, 1, 2)


def a_run(arm, seed, clean, *, lossy=None, loss_rate=0.0, steps=100, repair="zero"):
    return {
        "arm": arm, "seed": seed, "task": "text", "loss_rate": loss_rate, "repair": repair, "reliable_gather": True,
        "sequence_parallel": False, "max_steps": steps, "batch_size": 8, "block_size": 16, "cross_entropy_clean": clean,
        "cross_entropy_lossy": clean if lossy is None else lossy,
    }  # fmt: skip


@pytest.fixture
def runs():
    """Half of the tokens cost 0.4 nats. Seeds differ by as much, and alike in every arm."""
    rows = []
    for seed in SEEDS:
        own = 4 + 0.4 * seed
        rows += [
            a_run("no loss", seed, own),
            a_run(HALF, seed, own + 0.4, steps=50),
            a_run(LOSSY, seed, own + 0.2, lossy=own + 0.6, loss_rate=0.1),
            a_run(REPAIRED, seed, own + 0.1 + 0.01 * (seed - 1), loss_rate=0.1, repair="hadamard(64)"),
        ]
    return pd.DataFrame(rows)


def test_rises_are_paired_by_seed(runs):
    found = nats_lost(runs).set_index("arm")
    assert found.loc[HALF, "clean"] == pytest.approx(0.4)
    assert (found.loc[LOSSY, "clean"], found.loc[LOSSY, "lossy"]) == pytest.approx((0.2, 0.6))
    assert found.loc[LOSSY, "clean_high"] - found.loc[LOSSY, "clean_low"] == pytest.approx(0, abs=1e-9)
    assert math.isnan(found.loc["no loss", "clean"])
    assert list(found["seeds"]) == [3] * 4
    assert found.loc["no loss", "clean_mean"] == pytest.approx(4.4)
    assert dict(found["tokens"]) == {"no loss": 12800, HALF: 6400, LOSSY: 12800, REPAIRED: 12800}


def test_tokens_are_read_off_the_lossless_runs(runs):
    found = nats_lost(runs).set_index("arm")
    assert found.loc[LOSSY, "clean_times_tokens"] == pytest.approx(2**0.5), "half of the nats that halving costs"
    each = [2 ** ((0.1 + 0.01 * (seed - 1)) / 0.4) for seed in SEEDS]
    assert found.loc[REPAIRED, "clean_times_tokens"] == pytest.approx(np.prod(each) ** (1 / 3))
    low, high = (found.loc[REPAIRED, f"clean_times_tokens_{end}"] for end in ("low", "high"))
    assert low < min(each)
    assert high > max(each)
    assert math.isnan(found.loc[LOSSY, "lossy_times_tokens"]), "worse than the shortest lossless run"
    assert math.isnan(found.loc["no loss", "clean_times_tokens"])
    assert list(nats_lost(runs[runs["loss_rate"] == 0])["arm"]) == ["no loss", HALF], "a table too"


def test_a_single_run_better_than_the_lossless_ones_leaves_its_arm_without_a_number_of_tokens(runs):
    runs.loc[(runs["arm"] == LOSSY) & (runs["seed"] == 1), "cross_entropy_clean"] = 4.39
    found = nats_lost(runs).set_index("arm").loc[LOSSY]
    assert math.isnan(found["clean_times_tokens"])
    assert found["clean_mean"] == pytest.approx((4.2 + 4.39 + 5.0) / 3), "its rise counts"


def test_a_run_that_became_not_finite_leaves_its_arm_without_a_mean(runs):
    broken = (runs["arm"] == LOSSY) & (runs["seed"] == 1)
    runs.loc[broken, ["cross_entropy_clean", "cross_entropy_lossy"]] = math.nan
    found = nats_lost(runs).set_index("arm").loc[LOSSY]
    assert (found["clean"], found["seeds"]) == (pytest.approx(0.2), 2)
    assert math.isnan(found["clean_mean"])
    assert math.isnan(found["clean_times_tokens"])
    runs.loc[broken, "cross_entropy_clean"] = 4.6  # it diverges only over losses
    found = nats_lost(runs).set_index("arm").loc[LOSSY]
    assert (found["seeds"], found["clean"], found["lossy"]) == (3, pytest.approx(0.2), pytest.approx(0.6))
    assert math.isnan(found["lossy_mean"])


def test_the_training_loss_turns_where_its_running_median_is_least():
    losses = [8.0, 7.0, 6.0, 6.5, 6.2, 2.0, 6.4, 7.0, 7.2, 7.1, 7.3]  # the 2.0 is one lucky batch
    curve = [{"step": 10 * (number + 1), "loss": loss} for number, loss in enumerate(losses)]
    config = {"loss_rate": 0.1, "repair": "zero", "sequence_parallel": False, "mtu_bytes": 1500}
    config |= {"seed": 1, "warmup_steps": 100}
    easier = [{"step": each["step"], "loss": 6.0 - each["step"] / 1000} for each in curve]
    lossless = {**config, "loss_rate": 0.0, "reliable_gather": True, "total_steps": 110, "tensor_parallel_size": 4}
    records = [
        {"config": {**lossless, "loss_rate": 0.1, "reliable_gather": False}, "curves": {"train_loss": curve}},
        {"config": {**lossless, "loss_rate": 0.1}, "curves": {"train_loss": curve}},
        {"config": {**lossless, "total_steps": 55}, "curves": {"train_loss": curve}},
        {"config": lossless, "curves": {"train_loss": easier}},
    ]
    (row,) = turning_points(records).to_dict("records")
    assert row.pop("lossless_rise") == pytest.approx(-0.06), "from step 40 to the median of the last three points"
    assert row == {**config, "step": 40, "least": 6.2, "last": 7.2}
    (alone,) = turning_points(records[:1]).to_dict("records")
    assert alone["lossless_rise"] is None


def test_training_curves_are_those_of_the_named_networks_in_their_order():
    def record(loss):
        return {"curves": {"train_loss": [{"step": step, "loss": loss + step % 2} for step in (1, 2, 3)]}}

    rows = [("bare", 0.1, 0), ("bare", 0.1, 1), ("bare", 0.3, 0), ("no loss", 0.0, 1)]
    runs = pd.DataFrame(rows, columns=["arm", "loss_rate", "seed"])
    records = [record(loss) for loss in (5.0, 6.0, 9.0, 4.0)]
    networks = {("no loss", 0.0): "none", ("bare", 0.1): "a tenth", ("sharded", 0.1): "not run"}
    curves = training_curves(runs, records, networks)
    assert list(curves["network"]) == ["none"] * 3 + ["a tenth"] * 6
    assert list(curves["seed"]) == [1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert list(curves["step"]) == [1, 2, 3] * 3
    assert list(curves["loss"]) == [5.0, 5.0, 5.0, 6.0, 6.0, 6.0, 7.0, 7.0, 7.0], "medians of the points around"
    assert training_curves(runs, records, {}).empty


def test_a_run_departs_where_it_stays_above_the_lossless_run_of_its_seed():
    losses = {
        ("no loss", 0): [8.0, 7.0, 7.5, 6.0, 6.5],  # hard passages at the third and the last point
        ("fails", 0): [8.0, 7.3, 7.6, 6.3, 7.5],  # above at the second point, and from the fourth on
        ("bears", 0): [8.0, 7.1, 7.6, 6.1, 6.6],
        ("fails", 1): [9.0] * 5,  # without a lossless run
    }
    curves = pd.DataFrame(
        [
            {"network": network, "seed": seed, "step": 10 * (number + 1), "loss": loss}
            for (network, seed), run in losses.items()
            for number, loss in enumerate(run)
        ]
    )
    rows = departures(curves).set_index(["network", "seed"])["step"]
    assert list(rows.index) == [("fails", 0), ("bears", 0)]
    assert rows["fails", 0] == 40
    assert math.isnan(rows["bears", 0])
