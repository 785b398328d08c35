"""Compare made-up runs, and check the results by hand or against scipy."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from paper.study import compare_arms, falls_and_gains, unlearned_trainings


def table(arms, task="t", loss_rate=0.1, max_steps=10):
    """Return a row a run: an arm's n-th value is seed n's accuracy."""
    training = {"task": task, "model_name": "gpt2-nano", "max_steps": max_steps, "learning_rate": 1e-3}
    rows = [
        {**training, "arm": arm, "loss_rate": 0.0 if arm == "none" else loss_rate, "seed": seed, "majority_share": 0.3}
        | {"accuracy_lossy": value}
        for arm, values in arms.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_differences_are_paired_by_seed():
    runs = table({"none": [0.5, 0.6, 0.7], "worse": [0.48, 0.59, 0.66]})
    result = compare_arms(runs.sample(frac=1, random_state=1), reference="none").set_index("arm")
    row = result.loc["worse"]
    pairs = np.array([-0.02, -0.01, -0.04])
    assert row["difference"] == pytest.approx(pairs.mean())
    half = stats.t.ppf(0.975, 2) * stats.sem(pairs)
    assert (row["low"], row["high"]) == pytest.approx((pairs.mean() - half, pairs.mean() + half))
    assert row["p"] == pytest.approx(stats.ttest_rel([0.48, 0.59, 0.66], [0.5, 0.6, 0.7]).pvalue)
    assert row["seeds"] == 3
    assert result.loc["none", "mean"] == pytest.approx(0.6)
    assert np.isnan(result.loc["none", "difference"])
    row = (
        compare_arms(table({"none": [0.5, 0.6, 0.7], "worse": [0.4, 0.5]}), reference="none")
        .set_index("arm")
        .loc["worse"]
    )
    assert (row["seeds"], row["difference"]) == (2, pytest.approx(-0.1)), "a seed that one lacks is left out"


def test_all_comparisons_of_all_tasks_are_corrected_together():
    noise = np.array([0.011, -0.009, 0.004, -0.002, 0.006])
    arms = {"none": [0.5] * 5, "a": 0.45 + noise, "b": 0.49 + noise, "c": 0.5 + noise}
    runs = pd.concat([table(arms), table(arms, task="other")])
    result = compare_arms(runs, reference="none")
    tested = result[result["arm"] != "none"].sort_values("p")
    assert len(tested) == 6
    worst = np.maximum.accumulate(tested["p"].to_numpy() * np.arange(6, 0, -1)).clip(max=1)
    assert tested["p_holm"].to_numpy() == pytest.approx(worst)
    alone = compare_arms(table(arms), reference="none")
    assert (tested["p_holm"].min()) > alone["p_holm"].min()


def test_pairs_that_do_not_vary_and_single_pairs():
    result = compare_arms(table({"none": [0.5, 0.6], "same": [0.5, 0.6], "less": [0.25, 0.35]}), reference="none")
    p = result.set_index("arm")["p"]
    assert p["same"] == 1
    assert np.isnan(p["less"])  # ties of counts tell no variance
    single = compare_arms(table({"none": [0.5], "one": [0.4]}), reference="none").set_index("arm").loc["one"]
    assert (single["difference"], single["high"]) == (pytest.approx(-0.1), np.inf)
    assert np.isnan(single["p"])


def test_each_training_is_compared_with_its_own_reference():
    runs = pd.concat(
        [table({"none": [0.5], "a": [0.4]}), table({"none": [0.7], "a": [0.65], "b": [0.7]}, max_steps=30)]
    )
    alone = table({"a": [0.3]}, max_steps=90)  # whose reference is not run
    result = compare_arms(pd.concat([runs, alone]), reference="none").set_index(["max_steps", "arm"])["difference"]
    assert result[10, "a"] == pytest.approx(-0.1)
    assert result[30, "a"] == pytest.approx(-0.05)
    assert result[30, "b"] == 0
    assert np.isnan(result[90, "a"])


def test_lossy_arms_are_also_compared_with_their_reference():
    runs = table({"no loss": [0.5, 0.6, 0.7], "zero": [0.4, 0.52, 0.6], "better": [0.45, 0.54, 0.66]})
    both = falls_and_gains(runs, reference="zero").set_index("arm")
    assert both.loc["better", "difference"] == pytest.approx(-0.05)
    assert both.loc["better", "gain"] == pytest.approx((0.05 + 0.02 + 0.06) / 3)
    alone = stats.ttest_rel([0.45, 0.54, 0.66], [0.4, 0.52, 0.6]).pvalue  # the only comparison of its kind
    assert both.loc["better", "gain_p_holm"] == pytest.approx(alone)
    assert both.loc[["no loss", "zero"], "gain"].isna().all()
    assert "gain" not in falls_and_gains(runs, reference=None)


def test_arms_of_another_training_gain_what_they_lose_less_against_their_own_lossless_runs():
    runs = pd.concat(
        [
            table({"no loss": [0.5, 0.6], "small": [0.4, 0.52]}),
            table({"no loss": [0.8, 0.9], "large": [0.75, 0.85]}, max_steps=30),
        ]
    )
    both = falls_and_gains(runs, reference="small").set_index("arm")
    assert both.loc["large", "gain"] == pytest.approx((0.05 + 0.03) / 2)


def test_a_training_that_does_not_learn_without_losses_is_listed():
    runs = pd.concat(
        [
            table({"no loss": [0.34, 0.33], "a": [0.3, 0.31]}),
            table({"no loss": [0.34, 0.31], "a": [0.5, 0.5]}, max_steps=30),
            table({"a": [0.9]}, max_steps=90),  # of which nothing is known without losses
        ],
        ignore_index=True,
    )
    assert unlearned_trainings(runs)["max_steps"].tolist() == [30]
