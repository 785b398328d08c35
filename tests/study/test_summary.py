import json

import pytest

from lossytp.study.records import tidy
from lossytp.study.summary import summarise, with_arms

BASELINE = {"majority_share": 0.3, "bag_of_words": 0.9, "test_examples": 4}


def test_arms_share_the_runs_without_losses(study):
    arms = with_arms(tidy(study))
    assert list(arms["arm"].unique()) == ["Bernoulli", "Gilbert-Elliott, mean burst 8 packets"]
    assert (arms.groupby("arm").size() == 9).all()


def test_arms_of_other_processes_go_by_their_names(record):
    text = "correlated(shared=0.5)"
    runs = [record(loss_rate=rate, seed=0, accuracy=0.6, burst=8.0, loss_type=text) for rate in (0.1, 0.2)]
    arms = with_arms(tidy([record(loss_rate=0.0, seed=0, accuracy=0.6), *runs]))
    assert arms["arm"].tolist() == [text] * 3


def test_budgets_and_differences_of_made_up_records(study):
    summary = summarise(with_arms(tidy(study)), study, BASELINE)
    budgets = [arm["budget"]["value"] for arm in summary["arms"]]
    assert budgets == pytest.approx([0.05, 0.025])  # 0.01 / 0.2 and 0.01 / 0.4
    assert summary["difference_at_highest_rate"]["value"] == pytest.approx(-0.04)
    assert summary["lossless_accuracy"]["value"] == pytest.approx(0.61)
    assert (summary["seeds"], summary["cells"], summary["not_finite"]) == (3, 15, 0)
    assert summary["packets"] == 15_000
    assert summary["hours"] == pytest.approx(0.15)
    assert summary["arms"][1]["fall_at_largest_rate"]["value"] == pytest.approx(0.08)
    json.dumps(summary, allow_nan=False)


def test_a_budget_that_is_never_reached_is_null(record):
    records = [record(loss_rate=rate, seed=seed, accuracy=0.6) for rate in (0.0, 0.1) for seed in range(3)]
    summary = summarise(with_arms(tidy(records)), records, BASELINE)
    assert summary["arms"][0]["budget"] == {"value": None, "low": None, "high": None}
    assert summary["difference_at_highest_rate"] is None


def test_runs_that_differ_in_more_than_process_rate_and_seed_are_refused(study, record):
    odd = [*study, record(loss_rate=0.1, seed=9, accuracy=0.5, max_steps=11)]
    with pytest.raises(ValueError, match="max_steps"):
        summarise(with_arms(tidy(odd)), odd, BASELINE)


def test_a_baseline_of_another_sample_is_refused(study):
    with pytest.raises(ValueError, match="another test sample"):
        summarise(with_arms(tidy(study)), study, {**BASELINE, "test_examples": 5})
