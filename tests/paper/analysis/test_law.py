import numpy as np
import pandas as pd
import pytest

from lossytp.training.config import TrainConfig
from paper.law import (
    PowerLaw,
    explained_elsewhere,
    fit_power_law,
    law_arms,
    predict_other_packets,
    with_standard_errors,
)

BASE = {"max_steps": 200, "max_length": 48, "tensor_parallel_size": 4, "loss_rate": 0.1}
COHERENCE = {"docstrings": {"2": 0.0, "4": 0.0, "8": 0.0}}


def test_the_law_is_found_again():
    rng = np.random.default_rng(0)
    error, deviation, many = np.linspace(0.02, 0.4, 40), np.full(40, 0.002), np.full(40, 10**6)
    laws = [fit_power_law(error, 0.6 * error**1.2 + rng.normal(0, 0.002, 40), deviation, many) for _ in range(200)]
    assert np.mean([law.scale for law in laws]) == pytest.approx(0.6, abs=0.002)
    assert np.mean([law.exponent for law in laws]) == pytest.approx(1.2, abs=0.005)
    assert np.mean([law.chi_squared for law in laws]) == pytest.approx(1, abs=0.1)
    assert laws[0].r_squared > 0.99
    assert laws[0].fall(np.array([1.0])) == pytest.approx([laws[0].scale])


def test_precise_arms_decide():
    error = np.array([0.1, 0.2, 0.3, 0.4])
    fall = np.array([0.1, 0.2, 0.3, 0.9])
    law = fit_power_law(error, fall, np.array([1e-4, 1e-4, 1e-4, 1.0]), np.full(4, 5))
    assert law.exponent == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("seeds", [7, 10])
def test_chi_squared_is_1_if_errors_are_estimated_from_seeds(seeds):
    rng = np.random.default_rng(1)
    error = np.linspace(0.1, 0.4, 40)
    found = []
    for _ in range(200):
        falls_AS = 0.6 * error[:, None] ** 1.2 + rng.normal(0, 0.002, (40, seeds))
        deviations = falls_AS.std(axis=1, ddof=1) / seeds**0.5
        found.append(fit_power_law(error, falls_AS.mean(axis=1), deviations, np.full(40, seeds)).chi_squared)
    assert np.mean(found) == pytest.approx(1, abs=0.15)


def arms(*changes, **columns):
    configs = [TrainConfig(**{**BASE, **change}) for change in changes]
    table = pd.DataFrame(
        {
            "task": "docstrings",
            "arm": [f"arm {number}" for number in range(len(configs))],
            "loss_rate": [config.network.loss_rate for config in configs],
            "seeds": 5,
            "difference": -0.02,
            "low": -0.03,
            "high": -0.01,
            **columns,
        }
    )
    return law_arms(table, configs, {"docstrings": TrainConfig(**BASE)}, COHERENCE)


def test_arms_that_differ_in_anything_else_are_left_out():
    kept = arms(
        {},
        {"algorithm": "ring"},
        {"tensor_parallel_size": 2},
        {"repair": "fec(10, 5)"},
        {"reliable_gather": False},
        {"loss_rate": 0.2},
        {"mtu_bytes": 9000},
        {"repair": "rescale"},
        {"loss_type": "g-e", "mean_burst_packets": 8.0},
        {"lossy_direction": "forward"},
        {"max_steps": 600},
        {"model_name": "gpt2-micro"},
    )
    assert sorted(kept["arm"]) == [f"arm {number}" for number in range(6)]
    assert kept["both_phases"].sum() == 1


def test_errors_are_those_of_theory_and_falls_those_of_the_comparison():
    (row,) = arms({}).to_dict("records")
    assert row["squared_error"] == pytest.approx(3 * 0.1 / 4)  # uncorrelated parts, of which 3 of 4 cross a link
    assert row["missing_share"] == pytest.approx(0.075)
    assert (row["fall"], row["low"], row["high"]) == (0.02, 0.01, 0.03)
    assert row["standard_error"] == pytest.approx(0.01 / 2.776, rel=1e-3)  # Student's quantile of five seeds


def test_an_arm_of_several_experiments_counts_once_with_the_most_seeds():
    kept = arms({}, {}, {}, seeds=[5, 10, 3])
    assert kept[["arm", "seeds"]].to_numpy().tolist() == [["arm 1", 10]]


def test_lossless_arms_and_those_without_a_difference_are_left_out():
    assert arms({}, {"loss_rate": 0.0}, {"loss_rate": 0.3}, difference=[-0.02, -0.01, np.nan])["arm"].tolist() == [
        "arm 0"
    ]


def test_a_law_that_holds_everywhere_explains_other_arms_and_another_does_not():
    rates = np.array([0.02, 0.05, 0.1, 0.2, 0.3])
    usual = pd.DataFrame({"squared_error": rates, "missing_share": rates, "algorithm": "direct", "ranks": 4})
    other = usual.assign(squared_error=2 * rates, algorithm="ring")
    arms_of_both = pd.concat([usual, other], ignore_index=True).assign(repair="zero", standard_error=0.001, seeds=5)
    arms_of_both["fall"] = 0.6 * arms_of_both["squared_error"] ** 1.2
    assert explained_elsewhere(arms_of_both, "squared_error") == pytest.approx(1)
    assert explained_elsewhere(arms_of_both, "missing_share") < 0.5
    assert explained_elsewhere(arms_of_both[:5], "squared_error") is None, "there are no other arms"
    assert explained_elsewhere(arms_of_both[2:], "squared_error") is None, "too few usual arms"


def test_one_arm_fixes_the_scale_for_other_packets():
    law = PowerLaw(1.0, 2.0, 4, 0.99, 1.0)
    rows = {"loss_rate": [0.2, 0.2, 0.4], "repair": ["fec(10, 8)", "zero", "zero"], "fall": [0.1, 0.02, 0.2]}
    found = predict_other_packets(law, pd.DataFrame(rows | {"squared_error": [0.1, 0.2, 0.4]}), known_rate=0.2)
    assert found["known"].tolist() == [False, True, False]
    assert found["predicted"].tolist() == pytest.approx([0.005, 0.02, 0.08])


@pytest.mark.parametrize("standard_error", [[np.nan] * 4, [0.0, 0.01, 0.01, 0.01]])
def test_a_fit_that_cannot_weigh_its_arms_is_refused(standard_error):
    error = np.array([0.1, 0.2, 0.3, 0.4])
    with pytest.raises(ValueError, match="do not determine a power law: give at least 4 arms"):
        fit_power_law(error, 0.9 * error, np.array(standard_error), np.full(4, 5))


@pytest.mark.parametrize("arms", [1, 3])
def test_a_law_of_too_few_arms_is_refused(arms):
    error = np.linspace(0.1, 0.4, arms)
    with pytest.raises(ValueError, match=f"^{arms} arms do not determine a power law: give at least 4$"):
        fit_power_law(error, error, np.full(arms, 0.01), np.full(arms, 5))


def test_a_fit_weighs_only_arms_with_standard_errors():
    table = pd.DataFrame({"arm": list("abcd"), "standard_error": [0.01, np.nan, 0.0, np.inf]})
    assert with_standard_errors(table)["arm"].to_list() == ["a"]
