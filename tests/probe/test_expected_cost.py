"""What a network would cost by the study's runs: by hand, and beside the paper's own numbers."""

import json
import math

import pandas as pd
import pytest

from lossyprobe.expected_cost import RESULTS, comparable_runs, expected_costs, side_by_side

SEEDS = (0, 1, 2)


def runs(folder, *arms):
    """Runs of lossless accuracy 0.8, and of arms (algorithm, repair, reliable_gather, loss_type, rate, burst, drop)."""
    rows = []
    for seed in SEEDS:
        spread = 0.001 * (seed - 1)
        for algorithm, repair, reliable, loss_type, rate, burst, drop in [
            ("direct", "zero", True, "ber", 0, 0, 0),
            *arms,
        ]:
            row = {"arm": "an arm", "run": "a run", "task": "reviews", "loss_type": loss_type, "loss_rate": rate}
            row |= {"mean_burst_packets": burst, "ge_config": None, "algorithm": algorithm, "repair": repair}
            row |= {"reliable_gather": reliable, "seed": seed, "max_steps": 200, "dropout": None, "status": "finished"}
            row |= {"processes": 1, "accuracy_lossy": 0.8 + 3 * spread - drop - (spread if drop else 0)}
            rows.append(row | {"experiment": "01_tolerance"})
    pd.DataFrame(rows).to_csv(folder / "experiment_summary.csv", index=False)
    return comparable_runs(folder)


def bare(rate, drop, loss_type="ber", burst=1.0):
    return ("direct", "zero", True, loss_type, rate, burst, drop)


def cost(table, rate, burst=1.0):
    return expected_costs(table, loss_rate=rate, mean_burst_packets=burst).iloc[0]


def test_costs_are_interpolated_between_rates(tmp_path):
    table = runs(tmp_path, bare(0.1, 0.02), bare(0.2, 0.06))
    at, between, below, beyond = (cost(table, rate) for rate in (0.1, 0.15, 0.05, 0.4))
    assert [row["cost"] for row in (at, between, below, beyond)] == pytest.approx([0.02, 0.04, 0.01, 0.12])
    assert [row["extrapolated"] for row in (at, between, below, beyond)] == [False, False, True, True]
    assert at["basis"] == "measured at 0.1"
    assert between["basis"] == "between 0.1 and 0.2"
    assert below["basis"] == "in proportion to 0.1; below every tried rate"
    assert beyond["basis"] == "in proportion to 0.2; beyond every tried rate"
    half = 0.001 * 4.302653 / math.sqrt(3)  # Student's, of drops 0.001 apart
    assert (at["high"] - at["low"]) / 2 == pytest.approx(half, rel=1e-5)


@pytest.mark.parametrize("rate", [0.1 + 0.2, 0.3 - 1e-15])
def test_a_rate_that_rounding_moved_is_a_measured_one(tmp_path, rate):
    found = cost(runs(tmp_path, bare(0.1, 0.02), bare(0.3, 0.06)), rate)
    assert found["basis"] == "measured at 0.3"
    assert not found["extrapolated"]
    assert found["cost"] == pytest.approx(0.06)


def test_no_losses_cost_nothing_for_certain(tmp_path):
    found = cost(runs(tmp_path, bare(0.1, 0.02, "g-e", 8.0)), 0.0)
    assert found[["cost", "low", "high", "extrapolated", "basis"]].to_list() == [0, 0, 0, False, "no losses"]


def test_the_closest_burst_stands_for_yours(tmp_path):
    table = runs(tmp_path, bare(0.1, 0.02), bare(0.1, 0.03, "g-e", 16.0))
    single, short, long = (cost(table, 0.1, burst) for burst in (1 / 0.9, 3.0, 12.0))
    assert [row["cost"] for row in (single, short, long)] == pytest.approx([0.02, 0.02, 0.03])
    assert [row["extrapolated"] for row in (single, short, long)] == [False, True, False]
    assert short["basis"] == "measured at 0.1; single losses stand for bursts of 3.0"
    assert not cost(runs(tmp_path, bare(0.4, 0.02, "g-e", 4.0)), 0.4, 4.0)["extrapolated"], "the same burst"


def test_budgets_are_the_rate_of_one_point(tmp_path):
    table = runs(tmp_path, bare(0.1, 0.005), bare(0.2, 0.015), bare(0.3, 0.025))
    found = cost(table, 0.1)
    assert found["budget"] == pytest.approx(0.15)
    assert found["budget_low"] < 0.15 < found["budget_high"]
    few = cost(runs(tmp_path, bare(0.2, 0.04)), 0.1)
    assert few["budget"] == pytest.approx(0.05)
    assert math.isnan(few["budget_low"])
    assert cost(runs(tmp_path, bare(0.2, 0.001)), 0.1)["budget"] == math.inf


def test_networks_are_told_apart_and_other_trainings_left_out(tmp_path):
    table = runs(tmp_path, bare(0.1, 0.02), ("ring", "local", False, "ber", 0.1, 1.0, 0.03))
    longer = pd.read_csv(tmp_path / "experiment_summary.csv").assign(max_steps=600, experiment="01_training")
    correlated = longer.assign(max_steps=200, loss_type="correlated(shared=0.5)")
    both = pd.concat([pd.read_csv(tmp_path / "experiment_summary.csv"), longer, correlated])
    both.to_csv(tmp_path / "experiment_summary.csv", index=False)
    pd.testing.assert_frame_equal(comparable_runs(tmp_path), table)
    costs = expected_costs(table, loss_rate=0.1, mean_burst_packets=1.1)
    assert costs[["algorithm", "phase", "repair"]].to_numpy().tolist() == [
        ["direct", "reduce", "zero"],
        ["ring", "both", "local"],
    ]


def test_a_table_to_read(tmp_path):
    costs = expected_costs(runs(tmp_path, bare(0.2, 0.04)), loss_rate=0.1, mean_burst_packets=1.1)
    row = side_by_side(costs).iloc[0]
    assert row["points lost in reviews"] == "2.0 (1.9 to 2.1)?"
    assert row["one point at, reviews"] == "5 %?"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("phase", "algorithm", "experiment", "arm"),
    [("reduce", "direct", "01_tolerance", "reduce phase"), ("both", "ring", "03_rings", "ring, both phases")],
)
def test_the_committed_results_cost_what_the_paper_says(phase, algorithm, experiment, arm):
    costs = expected_costs(comparable_runs(RESULTS), loss_rate=0.1, mean_burst_packets=1 / 0.9)
    chosen = costs[(costs["phase"] == phase) & (costs["algorithm"] == algorithm) & (costs["repair"] == "zero")]
    falls = pd.read_csv(RESULTS / "answers" / "comparisons.csv")
    falls = falls[(falls["experiment"] == experiment) & (falls["arm"] == arm) & (falls["loss_rate"] == 0.1)]
    curves = json.loads((RESULTS / "answers" / "tolerance.json").read_text())["tolerance"]
    assert not chosen["extrapolated"].any()
    assert len(falls) == 2
    for _, fall in falls.iterrows():
        row = chosen[chosen["task"] == fall["task"]].iloc[0]
        assert [row["cost"], row["low"], row["high"]] == pytest.approx(list(fall[["fall", "low", "high"]]), rel=1e-4)
        curve = next(each for each in curves if (each["task"], each["name"]) == (fall["task"], arm))
        assert row["budget"] == pytest.approx(curve["budget"]["value"])
