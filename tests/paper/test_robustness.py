"""Check comparisons of trainings with and without losses by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from paper.robustness import evaluation_changes, gains

RATES = [0.0, 0.3]


def evaluations(accuracies, task="t"):
    """Return a row an evaluation: the n-th value at (trained_at, evaluated_at) is seed n's accuracy."""
    return pd.DataFrame(
        [
            {"task": task, "trained_at": trained, "evaluated_at": evaluated, "seed": seed, "accuracy": value}
            for (trained, evaluated), values in accuracies.items()
            for seed, value in enumerate(values)
        ]
    )


KNOWN = {
    (0.0, 0.0): [0.60, 0.61, 0.65],
    (0.3, 0.0): [0.59, 0.61, 0.62],
    (0.0, 0.3): [0.40, 0.45, 0.50],
    (0.3, 0.3): [0.50, 0.54, 0.61],
}


def test_gains_are_paired_by_seed_at_each_rate_of_evaluation():
    table = evaluations(KNOWN).sample(frac=1, random_state=1)
    result = gains(table).set_index(["task", "evaluated_at", "trained_at"])
    pairs = np.array([0.10, 0.09, 0.11])
    row = result.loc["t", 0.3, 0.3]
    half = stats.t.ppf(0.975, 2) * stats.sem(pairs)
    assert (row["difference"], row["low"], row["high"]) == pytest.approx((0.1, 0.1 - half, 0.1 + half))
    p_values = [stats.ttest_rel(KNOWN[0.3, rate], KNOWN[0.0, rate]).pvalue for rate in RATES]
    assert row["p_holm"] == pytest.approx(2 * p_values[1])  # the smaller of the two
    other = result.loc["t", 0.0, 0.3]
    assert (other["difference"], other["p_holm"]) == pytest.approx((-0.04 / 3, p_values[0]))
    assert (row["seeds"], row["mean"]) == (3, pytest.approx(0.55))
    assert result.xs(0.0, level="trained_at")["difference"].isna().all()
    assert len(result) == 4


def test_changes_are_each_models_own_and_say_whom_losses_harm_less():
    table = evaluations(KNOWN).sample(frac=1, random_state=1)
    result = gains(evaluation_changes(table)).set_index(["evaluated_at", "trained_at"]).sort_index()
    assert list(result.index) == [(0.3, 0.0), (0.3, 0.3)]
    assert result["mean"].tolist() == pytest.approx([-0.17, -0.17 / 3])  # -20, -16, -15 and -9, -7, -1 points
    pairs = np.array([0.11, 0.09, 0.14])
    row, half = result.loc[0.3, 0.3], stats.t.ppf(0.975, 2) * stats.sem(pairs)
    assert (row["difference"], row["low"], row["high"]) == pytest.approx((0.34 / 3, 0.34 / 3 - half, 0.34 / 3 + half))


def test_tasks_are_compared_apart_and_corrected_together():
    both = gains(pd.concat([evaluations(KNOWN), evaluations(KNOWN, task="other")])).dropna(subset=["difference"])
    alone = gains(evaluations(KNOWN)).dropna(subset=["difference"])
    assert both.groupby("task")["difference"].apply(list).tolist() == [alone["difference"].tolist()] * 2
    assert both["p_holm"].min() == pytest.approx(2 * alone["p_holm"].min())


def test_tables_that_cannot_be_paired_are_refused():
    with pytest.raises(ValueError, match=r"t is evaluated twice at 0\.3, trained at 0, seed 1: leave one out"):
        gains(pd.concat([evaluations(KNOWN), evaluations(KNOWN).iloc[[7]]]))
    with pytest.raises(ValueError, match=r"'trained at 0' is unknown: choose one of trained at 0\.3"):
        gains(evaluations({(0.3, 0.3): [0.5, 0.6]}))
