import json

import pytest

from paper.tolerance import (
    differing_settings,
    task_settings,
    tolerance_curves,
)


def test_tolerance_curves_of_made_up_records(study, record, curves):
    arms = tolerance_curves(curves(study))
    assert [arm["budget"]["value"] for arm in arms] == pytest.approx([0.05, 0.025])  # 0.01 / 0.2 and 0.01 / 0.4
    assert [arm["fall_at_largest_rate"]["value"] for arm in arms] == pytest.approx([0.04, 0.08])
    assert {(arm["task"], arm["seeds"], arm["largest_rate"]) for arm in arms} == {("docstrings", 3, 0.2)}
    flat = [record(loss_rate=rate, seed=seed, accuracy=0.6) for rate in (0.0, 0.1) for seed in range(3)]
    (never,) = tolerance_curves(curves(flat))
    assert never["budget"] == {"value": None, "low": None, "high": None}
    json.dumps([*arms, never], allow_nan=False)


def test_tolerance_curves_do_not_pair_a_seed_without_all_its_rates(study, record, curves):
    begun = [record(loss_rate=rate, seed=3, accuracy=0.9 - rate, burst=8.0 if rate else None) for rate in (0.0, 0.1)]
    for arm, whole in zip(tolerance_curves(curves([*study, *begun])), tolerance_curves(curves(study)), strict=True):
        for name in ("seeds", "budget", "fall_at_largest_rate"):
            assert arm[name] == whole[name]


def test_task_settings_refuses_runs_that_differ_in_more_than_process_rate_and_seed(study, record):
    assert task_settings(study)["docstrings"]["settings"]["max_steps"] == 10
    odd = [*study, record(loss_rate=0.1, seed=9, accuracy=0.5, max_steps=11)]
    with pytest.raises(ValueError, match="the records of docstrings differ in max_steps"):
        task_settings(odd)
    scoped = [*study, record(loss_rate=0.1, seed=9, accuracy=0.5, lossy_direction="backward")]
    with pytest.raises(ValueError, match=r"the records of .* differ in lossy_direction"):
        task_settings([{**each, "config": {"lossy_direction": None, **each["config"]}} for each in scoped])
    other = record(loss_rate=0.1, seed=9, accuracy=0.5, max_steps=11, dataset="sst2")
    both = task_settings([*study, other])
    assert both["sst2"]["settings"]["max_steps"] == 11


def test_differing_settings_are_those_that_keep_a_run_off_a_curve(study, record):
    curve = task_settings(study)["docstrings"]
    run = record(loss_rate=0.15, seed=7, accuracy=0.5, burst=8.0)
    assert differing_settings(run, curve) == []
    run = record(loss_rate=0.15, seed=7, accuracy=0.5, repair="local", max_steps=2)
    run["data"]["sha256"] = "cd"
    assert differing_settings(run, curve) == ["repair", "max_steps", "data"]
