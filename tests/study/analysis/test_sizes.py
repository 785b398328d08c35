"""Whether tolerance depends on a model's size."""

import numpy as np
import pandas as pd
import pytest

from lossytp.study.analysis.sizes import exponents, falls_by_size, rises_by_size

PARAMETERS = {"small": 1_000_000, "middle": 4_000_000, "large": 16_000_000}
SEEDS = (0, 1, 2)


def fine_tuning(exponent: float) -> pd.DataFrame:
    """Return runs whose fall is 0.02 at a million parameters and follows the exponent. Seeds differ by more."""
    rows = [
        {"model_name": name, "parameters": count, "pretrained": 4.5, "seed": seed, "loss_rate": rate}
        | {"accuracy_lossy": 0.6 + 0.05 * seed - (rate > 0) * 0.02 * (count / 1e6) ** exponent}
        for name, count in PARAMETERS.items()
        for seed in SEEDS
        for rate in (0.0, 0.3)
    ]
    return pd.DataFrame(rows)


def inference(exponent: float) -> pd.DataFrame:
    rows = [
        {"model_name": name, "lossless": 4.5, "whole_packets": whole, "loss_rate": rate, "draw": draw}
        | {"rise": (1 + whole) * rate * (1 + 0.1 * draw) * (count / 1e6) ** exponent}
        for name, count in PARAMETERS.items()
        for whole in (False, True)
        for rate in (0.1, 0.3)
        for draw in SEEDS
    ]
    return pd.DataFrame(rows)


def test_falls_are_paired_by_seed():
    found = falls_by_size(fine_tuning(0.5)).set_index("model_name")
    assert found["fall"].to_dict() == pytest.approx({"small": 0.02, "middle": 0.04, "large": 0.08})
    assert (found["high"] - found["low"]).to_numpy() == pytest.approx(np.zeros(3), abs=1e-9)
    assert found["accuracy"].to_list() == pytest.approx([0.65] * 3)
    assert found["parameters"].to_dict() == PARAMETERS
    assert set(found["seeds"]) == {3}


def test_rises_are_averaged_over_draws():
    found = rises_by_size(inference(0.0), pd.Series(PARAMETERS))
    assert len(found) == 3 * 2 * 2
    (row,) = found.query("model_name == 'large' and whole_packets and loss_rate == 0.3").to_dict("records")
    assert row["rise"] == pytest.approx(0.66)
    assert row["low"] < 0.66 < row["high"]
    assert row["parameters"] == 16_000_000


@pytest.mark.parametrize("exponent", [-0.3, 0.0, 0.4])
def test_the_exponent_is_that_of_a_power_law(exponent):
    found = exponents(fine_tuning(exponent), inference(2 * exponent))
    assert set(found) == {"fall at 30 %"} | {
        f"rise at {rate} %{end}" for rate in (10, 30) for end in ("", ", whole packets")
    }
    assert found["fall at 30 %"]["value"] == pytest.approx(exponent)
    for name in set(found) - {"fall at 30 %"}:
        assert found[name]["value"] == pytest.approx(2 * exponent)


def test_the_interval_is_over_seeds():
    runs = fine_tuning(0.0)
    steeper = (runs["loss_rate"] > 0) & (runs["seed"] == 1) & (runs["model_name"] == "large")
    runs.loc[steeper, "accuracy_lossy"] -= 0.02  # twice the fall at the large end, in one seed
    found = exponents(runs, inference(0.0))["fall at 30 %"]
    slope = np.log(2) * np.log(4) / (2 * np.log(4) ** 2)
    assert found["value"] == pytest.approx(slope / 3)
    assert found["low"] < 0 < found["high"]


def test_a_seed_that_does_not_fall_leaves_no_exponent():
    runs = fine_tuning(0.0)
    better = (runs["loss_rate"] > 0) & (runs["seed"] == 1) & (runs["model_name"] == "large")
    runs.loc[better, "accuracy_lossy"] += 0.04
    assert exponents(runs, inference(0.0))["fall at 30 %"]["value"] is None
