"""Falls by the length of training."""

import numpy as np
import pandas as pd
import pytest

from lossytp.study.analysis.training_length import falls_by_length, gain_from_longer_training
from lossytp.study.records import tidy
from lossytp.training.config import TrainConfig


def an_arm(steps, rate, accuracy, *, fall=np.nan, learning_rate=1e-3, **settings):
    row = {"task": "docstrings", "max_steps": steps, "learning_rate": learning_rate}
    row |= {"arm": "lossy" if rate else "no loss", "loss_rate": rate, "mean": accuracy}
    config = TrainConfig(loss_rate=rate, tensor_parallel_size=4, **settings)
    return row | {"difference": -fall, "low": -fall - 0.01, "high": -fall + 0.01}, config


def tabled(arms):
    rows, configs = zip(*arms, strict=True)
    return pd.DataFrame(rows), configs


LOSSLESS_ARMS = [an_arm(100, 0.0, 0.6), an_arm(400, 0.0, 0.7), an_arm(1600, 0.0, 0.8)]


def test_the_slowdown_is_read_off_the_lossless_runs():
    lossy = [an_arm(steps, 0.3, 0.0, fall=fall) for steps, fall in ((100, 0.1), (400, 0.05), (1600, 0.1))]
    found = falls_by_length([tabled([*LOSSLESS_ARMS, *lossy])], learning_rate=1e-3)
    assert found["network"].unique().tolist() == ["30 %, one phase"]
    assert found["max_steps"].tolist() == [100, 400, 1600]
    # 0.65 lies half way between 100 and 400 steps, at 200; the shortest run is below every lossless one
    np.testing.assert_allclose(found["slowdown"], [np.nan, 2.0, 4.0])
    # a point more or less is a tenth of the way between two lengths
    np.testing.assert_allclose(found["slowdown_low"], [np.nan, 2 / 4**0.1, 4 / 4**0.1])
    np.testing.assert_allclose(found["slowdown_high"], [np.nan, 2 * 4**0.1, 4 * 4**0.1])
    assert found["low"].tolist() == pytest.approx([0.09, 0.04, 0.09])


def test_only_networks_that_cost_something_and_were_trained_longer_stay():
    lossy = [
        an_arm(100, 0.1, 0.5, fall=0.1),  # never trained longer
        an_arm(100, 0.01, 0.6, fall=0.001),
        an_arm(400, 0.01, 0.7, fall=0.002),  # costs too little
        an_arm(400, 0.3, 0.6, fall=0.1, learning_rate=4e-3),  # another learning rate
        an_arm(400, 0.2, 0.65, fall=0.05, reliable_gather=False),
        an_arm(400, 0.2, 0.64, fall=0.06, algorithm="ring"),
    ]
    found = falls_by_length([tabled(LOSSLESS_ARMS), tabled(lossy)], learning_rate=1e-3)
    assert found["network"].tolist() == ["20 %, both phases", "20 %, ring"]


def test_gain_from_longer_training_is_paired_by_seed(record):
    cost = {(10, 1e-3): 0.3, (10, 2e-3): 0.7, (30, 1e-3): 0.1}
    records = [
        record(
            loss_rate=loss_rate, seed=seed, max_steps=max_steps, learning_rate=learning_rate,
            accuracy=0.6 + 0.01 * seed - loss_rate * (0.1 * seed + cost[max_steps, learning_rate]),
        )
        for loss_rate in (0.0, 0.1, 0.2)
        for seed in (0, 1)
        for max_steps, learning_rate in cost
    ]  # fmt: skip
    table = tidy(records)
    table = table.assign(arm=(table["loss_rate"] > 0).map({True: "lossy", False: "no loss"}))
    (found,) = gain_from_longer_training(table)
    assert (found["task"], found["steps"], found["longer_steps"]) == ("docstrings", 10, 30)
    assert found["gain"]["value"] == pytest.approx(0.2 * 0.2)
    assert found["gain"]["high"] - found["gain"]["low"] == pytest.approx(0, abs=1e-9), "seeds differ, and alike at both"
