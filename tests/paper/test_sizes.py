"""Whether tolerance depends on a model's size."""

import numpy as np
import pandas as pd
import pytest

from paper.sizes import exponents, falls_of_models, of_equal_tokens, of_one_size, rises_of_models

PARAMETERS = {"small": 1_000_000, "middle": 4_000_000, "large": 16_000_000}
SEEDS = (0, 1, 2)


def fine_tuning(exponent: float) -> pd.DataFrame:
    """Return runs whose fall is 0.02 at a million parameters and follows the exponent. Seeds differ by more."""
    rows = [
        {"model_name": name, "parameters": count, "tokens": 8000, "pretrained": 4.5, "seed": seed, "loss_rate": rate}
        | {"accuracy_lossy": 0.6 + 0.05 * seed - (rate > 0) * 0.02 * (count / 1e6) ** exponent}
        for name, count in PARAMETERS.items()
        for seed in SEEDS
        for rate in (0.0, 0.3)
    ]
    return pd.DataFrame(rows)


def inference(exponent: float) -> pd.DataFrame:
    rows = [
        {"model_name": name, "tokens": 8000, "lossless": 4.5, "whole_packets": whole, "loss_rate": rate, "draw": draw}
        | {"rise": (1 + whole) * rate * (1 + 0.1 * draw) * (count / 1e6) ** exponent}
        for name, count in PARAMETERS.items()
        for whole in (False, True)
        for rate in (0.1, 0.3)
        for draw in SEEDS
    ]
    return pd.DataFrame(rows)


def test_falls_are_paired_by_seed():
    found = falls_of_models(fine_tuning(0.5)).set_index("model_name")
    assert found["fall"].to_dict() == pytest.approx({"small": 0.02, "middle": 0.04, "large": 0.08})
    assert (found["high"] - found["low"]).to_numpy() == pytest.approx(np.zeros(3), abs=1e-9)
    assert found["accuracy"].to_list() == pytest.approx([0.65] * 3)
    assert found["parameters"].to_dict() == PARAMETERS
    assert set(found["seeds"]) == {3}


def test_rises_are_averaged_over_draws():
    found = rises_of_models(inference(0.0), fine_tuning(0.0))
    assert len(found) == 3 * 2 * 2
    (row,) = found.query("model_name == 'large' and whole_packets and loss_rate == 0.3").to_dict("records")
    assert row["rise"] == pytest.approx(0.66)
    assert row["low"] < 0.66 < row["high"]
    assert row["parameters"] == 16_000_000


def with_other_tokens(table: pd.DataFrame, cost: str, exponent: float) -> pd.DataFrame:
    """Add the small model after half and twice of the tokens. Its lossy cost follows the exponent."""
    tables = [table]
    for factor in (0.5, 2):
        other = table[table["model_name"] == "small"].assign(tokens=int(factor * 8000))
        lossy = other["loss_rate"] > 0
        if cost == "rise":
            other.loc[lossy, "rise"] *= factor**exponent
        else:
            other.loc[lossy, "accuracy_lossy"] += (1 - factor**exponent) * 0.02
        tables.append(other)
    return pd.concat(tables, ignore_index=True)


def exponent(found, cost, rate, against="parameters"):
    (row,) = (row for row in found if (row["against"], row["cost"], row["loss_rate"]) == (against, cost, rate))
    return row


def test_tokens_have_exponents_of_their_own_and_leave_those_of_size_alone():
    runs, draws = fine_tuning(-0.3), inference(0.2)
    found = exponents(with_other_tokens(runs, "fall", 1), with_other_tokens(draws, "rise", 2))
    assert exponent(found, "fall", 0.3, "tokens")["value"] == pytest.approx(1)
    assert exponent(found, "rise", 0.1, "tokens")["value"] == pytest.approx(2)
    assert exponent(found, "rise, whole packets", 0.3, "tokens")["value"] == pytest.approx(2)
    of_size = [row for row in found if row["against"] == "parameters"]
    alone = exponents(runs, draws)
    assert [row["value"] for row in of_size] == pytest.approx([row["value"] for row in alone])


def test_models_are_compared_at_equal_tokens_and_at_one_size():
    runs = with_other_tokens(fine_tuning(0.0), "fall", 1)
    assert set(of_equal_tokens(runs)["model_name"]) == set(PARAMETERS)
    assert set(of_equal_tokens(runs)["tokens"]) == {8000}
    assert set(of_one_size(runs)["model_name"]) == {"small"}
    assert set(of_one_size(runs)["tokens"]) == {4000, 8000, 16000}
    assert of_one_size(fine_tuning(0.0)).empty


@pytest.mark.parametrize("power", [-0.3, 0.0, 0.4])
def test_the_exponent_is_that_of_a_power_law(power):
    found = exponents(fine_tuning(power), inference(2 * power))
    costs = [("fall", 0.3), *((f"rise{end}", rate) for end in ("", ", whole packets") for rate in (0.1, 0.3))]
    assert [(row["cost"], row["loss_rate"]) for row in found] == costs
    assert [row["value"] for row in found] == pytest.approx([power, *4 * [2 * power]])


def test_the_interval_is_over_seeds():
    runs = fine_tuning(0.0)
    steeper = (runs["loss_rate"] > 0) & (runs["seed"] == 1) & (runs["model_name"] == "large")
    runs.loc[steeper, "accuracy_lossy"] -= 0.02  # twice the fall at the large end, in one seed
    found = exponent(exponents(runs, inference(0.0)), "fall", 0.3)
    assert found["value"] == pytest.approx(np.log(4 / 3) / (2 * np.log(4))), "the large model's mean fall is 4/3"
    without = np.array([np.log(3 / 2), 0, np.log(3 / 2)]) / (2 * np.log(4))  # one seed left out at a time
    half = 4.3027 * (2 * without).std(ddof=1) / 3**0.5
    assert (found["low"], found["high"]) == pytest.approx((found["value"] - half, found["value"] + half), rel=1e-3)


def test_a_seed_that_does_not_fall_counts_and_a_model_that_does_not_leaves_no_exponent():
    runs = fine_tuning(0.0)
    better = (runs["loss_rate"] > 0) & (runs["seed"] == 1) & (runs["model_name"] == "large")
    runs.loc[better, "accuracy_lossy"] += 0.03
    assert exponent(exponents(runs, inference(0.0)), "fall", 0.3)["value"] < 0
    runs.loc[better, "accuracy_lossy"] += 0.04
    assert exponent(exponents(runs, inference(0.0)), "fall", 0.3)["value"] is None


def test_a_seed_that_a_model_lacks_is_left_out():
    runs = fine_tuning(-0.3)
    lacking = runs[~((runs["model_name"] == "large") & (runs["seed"] == 2))]
    assert exponent(exponents(lacking, inference(0.0)), "fall", 0.3)["value"] == pytest.approx(-0.3)
