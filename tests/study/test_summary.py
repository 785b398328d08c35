import json

import pandas as pd
import pytest

from lossytp.study import summary
from lossytp.study.records import tidy

BASELINES = {
    "docstrings": {
        "majority_share": 0.3, "bag_of_words": 0.9, "test_examples": 4, "model_name": "gpt2-nano", "max_length": 48,
    }
}  # fmt: skip


def test_arms_share_the_runs_without_losses(study, curves):
    arms = curves(study)
    assert list(arms["arm"].unique()) == ["alone", "bursts"]
    assert (arms.groupby("arm").size() == 9).all()


def test_budgets_and_falls_of_made_up_records(study, curves):
    arms = summary.tolerance(curves(study))
    assert [arm["budget"]["value"] for arm in arms] == pytest.approx([0.05, 0.025])  # 0.01 / 0.2 and 0.01 / 0.4
    assert [arm["fall_at_largest_rate"]["value"] for arm in arms] == pytest.approx([0.04, 0.08])
    assert [point["loss_rate"] for point in arms[0]["points"]] == [0.0, 0.1, 0.2]
    assert arms[0]["points"][0]["accuracy_lossy"]["value"] == pytest.approx(0.61)
    assert {(arm["task"], arm["seeds"], arm["largest_rate"]) for arm in arms} == {("docstrings", 3, 0.2)}
    json.dumps(arms, allow_nan=False)


def test_a_seed_without_all_its_rates_is_not_paired(study, record, curves):
    begun = [record(loss_rate=rate, seed=3, accuracy=0.9 - rate, burst=8.0 if rate else None) for rate in (0.0, 0.1)]
    for arm, whole in zip(summary.tolerance(curves([*study, *begun])), summary.tolerance(curves(study)), strict=True):
        for name in ("seeds", "budget", "largest_deviation", "fall_at_largest_rate"):
            assert arm[name] == whole[name]


def test_parts_of_the_test_sample_are_told_where_a_task_has_them(study, record, curves):
    other = [
        record(loss_rate=rate, seed=seed, accuracy=0.6, dataset="sst2_held_out")
        for rate in (0.0, 0.1)
        for seed in (0, 1)
    ]
    for each in other:
        config = each["config"]
        each["final"]["accuracy_official_lossy"] = 0.5 + 0.1 * config["seed"] - config["loss_rate"]
    docstrings, *_, held_out = summary.tolerance(curves([*study, *other]))
    assert held_out["points"][1]["accuracy_official_lossy"]["value"] == pytest.approx(0.45)
    assert held_out["official_fall_at_largest_rate"]["low"] == pytest.approx(0.1), "paired: seeds differ alike at both"
    assert "accuracy_official_lossy" not in docstrings["points"][1]
    assert "official_fall_at_largest_rate" not in docstrings


def test_falls_deviate_from_seed_to_seed_as_their_worst_rate_does(record, curves):
    accuracy = {0.0: [0.5, 0.6], 0.1: [0.5, 0.59], 0.2: [0.4, 0.53]}
    made = [record(loss_rate=rate, seed=s, accuracy=each[s]) for rate, each in accuracy.items() for s in (0, 1)]
    (arm,) = summary.tolerance(curves(made))
    assert arm["largest_deviation"] == pytest.approx(0.03 / 2**0.5)
    (alone,) = summary.tolerance(curves(made[::2]))
    assert alone["largest_deviation"] is None


def test_falls_are_ordered_by_what_is_missing_on_average_and_in_each_seed():
    falls = {"a": [0.1, 0.1], "b": [0.2, 0.4], "c": [0.3, 0.2]}  # c is above b in the first seed, and not on average
    runs = [("t", arm, seed, 0.2, 0.9 - fall) for arm, each in falls.items() for seed, fall in enumerate(each)]
    runs += [("t", "no loss", seed, 0.0, 0.9) for seed in (0, 1)]
    table = pd.DataFrame(runs, columns=["task", "arm", "seed", "loss_rate", "accuracy_lossy"])
    table = table.assign(model_name="m", max_steps=1, learning_rate=1.0)
    missing = {"arm": ["a", "b", "c", "other"], "share": [0.1, 0.2, 0.3, None], "error": [1.0, 3.0, 2.0, 4.0]}
    compared = pd.DataFrame(missing).assign(task="t", difference=[-0.1, -0.3, -0.25, -0.9])
    (order,) = summary.orders(table, compared, ["share", "error"]).values()
    assert order["share"] == {"value": pytest.approx(0.5), "least": pytest.approx(0.5)}
    assert order["error"] == {"value": pytest.approx(1), "least": pytest.approx(0.5)}
    assert not order["alike"]
    (alike,) = summary.orders(table, compared.assign(error=[1.0, 4.0, 9.0, 0.0]), ["share", "error"]).values()
    assert alike["alike"]


def test_how_much_less_is_lost_in_longer_runs_is_told_by_seed(record):
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
    (told,) = summary.regained(table.assign(arm=(table["loss_rate"] > 0).map({True: "lossy", False: "no loss"})))
    assert (told["task"], told["steps"], told["longer_steps"]) == ("docstrings", 10, 30)
    assert told["gain"]["value"] == pytest.approx(0.2 * 0.2)
    assert told["gain"]["high"] - told["gain"]["low"] == pytest.approx(0, abs=1e-9), "seeds differ, and alike at both"


def test_what_controls_lose_are_no_packets(study, record):
    elements = record(loss_rate=0.1, seed=7, accuracy=0.5, control="elements")
    ran, with_control = summary.how_it_ran(study), summary.how_it_ran([*study, elements])
    assert with_control["cells"] == ran["cells"] + 1
    assert (with_control["packets"], with_control["lost"]) == (ran["packets"], ran["lost"])


def test_how_it_ran(study):
    ran = summary.how_it_ran(study)
    assert (ran["cells"], ran["not_finite"], ran["packets"]) == (15, 0, 15_000)
    assert ran["hours"] == pytest.approx(0.15)
    assert ran["commits"] == 1


def test_a_budget_that_is_never_reached_is_null(record, curves):
    records = [record(loss_rate=rate, seed=seed, accuracy=0.6) for rate in (0.0, 0.1) for seed in range(3)]
    assert summary.tolerance(curves(records))[0]["budget"] == {"value": None, "low": None, "high": None}


def test_runs_that_differ_in_more_than_process_rate_and_seed_are_refused(study, record):
    assert summary.tasks(study, BASELINES)["docstrings"]["settings"]["max_steps"] == 10
    odd = [*study, record(loss_rate=0.1, seed=9, accuracy=0.5, max_steps=11)]
    with pytest.raises(ValueError, match="docstrings: the records differ in max_steps"):
        summary.tasks(odd, BASELINES)
    scoped = [*study, record(loss_rate=0.1, seed=9, accuracy=0.5, lossy_direction="backward")]
    with pytest.raises(ValueError, match="the records differ in lossy_direction"):
        summary.tasks([{**each, "config": {"lossy_direction": None, **each["config"]}} for each in scoped], BASELINES)
    other = record(loss_rate=0.1, seed=9, accuracy=0.5, max_steps=11, dataset="sst2")
    both = summary.tasks([*study, other], {**BASELINES, "sst2": BASELINES["docstrings"]})
    assert both["sst2"]["settings"]["max_steps"] == 11


def test_what_makes_a_run_no_point_of_a_curve_is_told(study, record):
    curve = summary.tasks(study, BASELINES)["docstrings"]
    run = record(loss_rate=0.15, seed=7, accuracy=0.5, burst=8.0)
    assert summary.differing(run, curve) == []
    run = record(loss_rate=0.15, seed=7, accuracy=0.5, repair="local", max_steps=2)
    run["data"]["sha256"] = "cd"
    assert summary.differing(run, curve) == ["repair", "max_steps", "data"]


@pytest.mark.parametrize(("name", "value"), [("test_examples", 5), ("model_name", "gpt2"), ("max_length", 64)])
def test_a_baseline_of_other_data_or_another_model_is_refused(study, name, value):
    with pytest.raises(ValueError, match=f"baseline of docstrings has {name} = {value!r}, the runs have "):
        summary.tasks(study, {"docstrings": {**BASELINES["docstrings"], name: value}})


def test_rows_are_json(study, curves):
    table = curves(study).assign(value=float("inf"))
    text = json.dumps(summary.rows(table[["task", "seed", "value", "ge_config"]].head(1)), allow_nan=False)
    assert json.loads(text) == [{"task": "docstrings", "seed": 0, "value": None, "ge_config": None}]


def test_every_rate_has_its_best_learning_rate(record):
    accuracies = {(0.0, 1e-3): 0.7, (0.0, 2e-3): 0.6, (0.3, 1e-3): 0.5, (0.3, 2e-3): 0.55}
    runs = [
        record(loss_rate=loss, seed=seed, accuracy=accuracy + 0.01 * seed * loss, learning_rate=rate)
        for (loss, rate), accuracy in accuracies.items()
        for seed in range(3)
    ]
    (found,) = summary.retuned(tidy(runs))
    assert (found["learning_rate_lossless"], found["learning_rate_lossy"]) == (1e-3, 2e-3)
    assert found["fall"]["value"] == pytest.approx(0.15 - 0.003)
    assert found["loss_rate"] == 0.3
    assert found["at_edge"]


def test_a_run_that_several_experiments_have_counts_once(study):
    assert summary.how_it_ran([*study, *study[:4]]) == summary.how_it_ran(study)
