import pandas as pd
import pytest

from lossytp.training.config import TrainConfig
from paper.packet_size import lost_together, packet_size_effect

BASE = {"max_steps": 200, "max_length": 48, "batch_size": 32, "tensor_parallel_size": 4, "loss_rate": 0.2}


def test_pieces_have_the_size_of_what_one_loss_takes():
    changes = [
        {},
        {"control": "elements"},
        {"control": "noise"},
        {"mtu_bytes": 216},
        {"loss_type": "g-e", "mean_burst_packets": 16.0},
        {"mtu_bytes": 10**9},
        {"mtu_bytes": 10**9, "loss_type": "g-e", "mean_burst_packets": 16.0},
        {"loss_type": "correlated(shared=0.5)"},
    ]
    configs = [TrainConfig(**{**BASE, **change}) for change in changes]
    rows = {"task": "docstrings", "loss_rate": 0.2, "difference": -0.02, "low": -0.03, "high": -0.01}
    compared = pd.DataFrame([{**rows, "arm": str(number)} for number in range(len(configs))])
    table = lost_together(compared, configs)
    chunk = 32 * 48 * 128 * 4 / 4  # texts, tokens, width, bytes, ranks
    assert dict(zip(table["arm"], table["bytes"], strict=True)) == {
        "1": 4,
        "3": 216,
        "0": 1500,
        "4": 16 * 1500,
        "5": chunk,
    }
    assert (table["fall"] == 0.02).all()
    assert list(table["bytes"]) == sorted(table["bytes"])


def test_packet_sizes_are_compared_with_the_smallest_seed_by_seed():
    runs = pd.DataFrame(
        [
            {"task": "t", "loss_rate": 0.2, "mtu_bytes": size, "seed": seed, "accuracy_lossy": 0.7 + seed / 10 - cost}
            for size, cost in ((216, 0.0), (1500, 0.02))
            for seed in (0, 1, 2)
        ]
    )
    runs.loc[(runs["mtu_bytes"] == 1500) & (runs["seed"] == 2), "accuracy_lossy"] -= 0.03
    (row,) = packet_size_effect(pd.concat([runs, runs.head(1)])).to_dict("records")
    assert (row["mtu_bytes"], row["smallest_bytes"], row["seeds"]) == (1500, 216, 3)
    assert row["cost"] == pytest.approx(0.03)
    half = 4.3027 * 0.01  # Student's quantile of three seeds, times the standard error of 0.02, 0.02 and 0.05
    assert (row["low"], row["high"]) == pytest.approx((0.03 - half, 0.03 + half), abs=1e-5)
