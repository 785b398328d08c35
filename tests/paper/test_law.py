"""The law of the squared error: fitted, its arms, what it explains and predicts, and the paper's section about it."""

from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from lossytp.study.tables import tidy
from lossytp.training.config import TrainConfig
from paper.comparisons import drops_and_gains
from paper.law import (
    PowerLaw,
    explained_elsewhere,
    fit_power_law,
    law,
    law_arms,
    predict_other_packets,
    with_standard_errors,
)
from paper.study import HEADLINE

mpl.use("Agg")
BASE = {"max_steps": 200, "max_length": 48, "tensor_parallel_size": 4, "loss_rate": 0.1}
COHERENCE = {"docstrings": {"2": 0.0, "4": 0.0, "8": 0.0}}


def test_fit_power_law_finds_the_law_again():
    rng = np.random.default_rng(0)
    error, deviation, many = np.linspace(0.02, 0.4, 40), np.full(40, 0.002), np.full(40, 10**6)
    laws = [fit_power_law(error, 0.6 * error**1.2 + rng.normal(0, 0.002, 40), deviation, many) for _ in range(200)]
    assert np.mean([law.scale for law in laws]) == pytest.approx(0.6, abs=0.002)
    assert np.mean([law.exponent for law in laws]) == pytest.approx(1.2, abs=0.005)
    assert np.mean([law.chi_squared for law in laws]) == pytest.approx(1, abs=0.1)
    assert laws[0].r_squared > 0.99
    fall, deviation = np.array([0.1, 0.2, 0.3, 0.9]), np.array([1e-4, 1e-4, 1e-4, 1.0])
    precise = fit_power_law(np.array([0.1, 0.2, 0.3, 0.4]), fall, deviation, np.full(4, 5))
    assert precise.exponent == pytest.approx(1, abs=0.01), "precise arms decide"


@pytest.mark.parametrize("seeds", [7, 10])
def test_fit_power_law_has_a_chi_squared_of_1_if_errors_are_estimated_from_seeds(seeds):
    rng = np.random.default_rng(1)
    error = np.linspace(0.1, 0.4, 40)
    found = []
    for _ in range(200):
        falls_AS = 0.6 * error[:, None] ** 1.2 + rng.normal(0, 0.002, (40, seeds))
        deviations = falls_AS.std(axis=1, ddof=1) / seeds**0.5
        found.append(fit_power_law(error, falls_AS.mean(axis=1), deviations, np.full(40, seeds)).chi_squared)
    assert np.mean(found) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("standard_error", [[np.nan] * 4, [0.0, 0.01, 0.01, 0.01], [0.01], [0.01] * 3])
def test_fit_power_law_refuses_arms_that_do_not_determine_it(standard_error):
    error = np.array([0.1, 0.2, 0.3, 0.4])[: len(standard_error)]
    with pytest.raises(ValueError, match="do not determine a power law: give at least 4"):
        fit_power_law(error, 0.9 * error, np.array(standard_error), np.full(len(error), 5))
    table = pd.DataFrame({"arm": list("abcd"), "standard_error": [0.01, np.nan, 0.0, np.inf]})
    assert with_standard_errors(table)["arm"].to_list() == ["a"]


def arms(*changes, **columns):
    configs = [TrainConfig(**{**BASE, **change}) for change in changes]
    rates = [config.network.loss_rate for config in configs]
    names = [f"arm {number}" for number in range(len(configs))]
    falls = {"seeds": 5, "difference": -0.02, "low": -0.03, "high": -0.01, **columns}
    table = pd.DataFrame({"task": "docstrings", "arm": names, "loss_rate": rates, **falls})
    return law_arms(table, configs, {"docstrings": TrainConfig(**BASE)}, COHERENCE)


def test_law_arms_leave_out_those_that_differ_in_anything_else():
    changes = [{}, {"algorithm": "ring"}, {"tensor_parallel_size": 2}, {"repair": "fec(10, 5)"}]
    changes += [{"reliable_gather": False}, {"loss_rate": 0.2}]
    others = [{"mtu_bytes": 9000}, {"repair": "rescale"}, {"loss_type": "g-e", "mean_burst_packets": 8.0}]
    others += [{"lossy_direction": "forward"}, {"max_steps": 600}, {"model_name": "gpt2-micro"}, {"loss_rate": 0.0}]
    kept = arms(*changes, *others)
    assert sorted(kept["arm"]) == [f"arm {number}" for number in range(6)]
    assert kept["both_phases"].sum() == 1
    assert arms({}, {"loss_rate": 0.3}, difference=[-0.02, np.nan])["arm"].tolist() == ["arm 0"]
    several = arms({}, {}, {}, seeds=[5, 10, 3])  # of several experiments
    assert several[["arm", "seeds"]].to_numpy().tolist() == [["arm 1", 10]]


def test_law_arms_have_the_errors_of_theory_and_the_falls_of_the_comparison():
    (row,) = arms({}).to_dict("records")
    assert row["squared_error"] == pytest.approx(3 * 0.1 / 4)  # uncorrelated parts, of which 3 of 4 cross a link
    assert row["missing_share"] == pytest.approx(0.075)
    assert (row["fall"], row["low"], row["high"]) == (0.02, 0.01, 0.03)
    assert row["standard_error"] == pytest.approx(0.01 / 2.776, rel=1e-3)  # Student's quantile of five seeds


def test_explained_elsewhere_tells_a_law_that_holds_everywhere_from_another():
    rates = np.array([0.02, 0.05, 0.1, 0.2, 0.3])
    usual = pd.DataFrame({"squared_error": rates, "missing_share": rates, "algorithm": "direct", "ranks": 4})
    other = usual.assign(squared_error=2 * rates, algorithm="ring")
    arms_of_both = pd.concat([usual, other], ignore_index=True).assign(repair="zero", standard_error=0.001, seeds=5)
    arms_of_both["fall"] = 0.6 * arms_of_both["squared_error"] ** 1.2
    assert explained_elsewhere(arms_of_both, "squared_error") == pytest.approx(1)
    assert explained_elsewhere(arms_of_both, "missing_share") < 0.5
    assert explained_elsewhere(arms_of_both[:5], "squared_error") is None, "there are no other arms"
    assert explained_elsewhere(arms_of_both[2:], "squared_error") is None, "too few usual arms"


def test_predict_other_packets_fixes_the_scale_by_one_arm():
    rows = {"loss_rate": [0.2, 0.2, 0.4], "repair": ["fec(10, 8)", "zero", "zero"], "fall": [0.1, 0.02, 0.2]}
    table = pd.DataFrame(rows | {"squared_error": [0.1, 0.2, 0.4]})
    found = predict_other_packets(PowerLaw(1.0, 2.0, 4, 0.99, 1.0), table, known_rate=0.2)
    assert found["known"].tolist() == [False, True, False]
    assert found["predicted"].tolist() == pytest.approx([0.005, 0.02, 0.08])


RATES = (0.0, 0.05, 0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("rates", "seeds", "noise", "arms"),
    [(RATES, 3, 0.001, 4), (RATES, 1, 0.001, None), (RATES, 3, 0.0, None), (RATES[:3], 3, 0.001, None)],
)
def test_law_is_fitted_to_enough_arms_with_standard_errors(record, rates, seeds, noise, arms):
    rng = np.random.default_rng(0)
    records = [
        record(loss_rate=rate, seed=seed, accuracy=0.7 - rate / 5 + rng.normal(0, noise), loss_type="ber")
        for rate in rates
        for seed in range(seeds)
    ]
    table = tidy(records)
    table.insert(0, "arm", ["single losses" if rate else "no loss" for rate in table["loss_rate"]])
    configs = [TrainConfig.from_dict(each["config"]) for each in records[::seeds]]
    study = SimpleNamespace(
        records={HEADLINE: records}, comparisons={HEADLINE: drops_and_gains(table, reference=None)},
        configs=lambda name: configs, baselines={"docstrings": {"coherence": {"4": 0.0}}},
        draw=lambda figure, name: None,
    )  # fmt: skip
    found = law(study)
    assert (len(found["law_arms"]) if found else None) == arms
    if found:
        assert found["law"]["docstrings"]["scale"] == pytest.approx(0.2 / 0.75, rel=0.2)
