"""Falls by the length of training."""

import numpy as np
import pandas as pd
import pytest

from lossytp.study.tables import tidy
from lossytp.training.config import TrainConfig
from paper.robustness import gain_from_longer_training
from paper.training_length import changes_in_longest_training, falls_by_length, slowdowns


def an_arm(steps, rate, accuracy, *, fall=np.nan, learning_rate=1e-3, **settings):
    row = {"task": "docstrings", "max_steps": steps, "learning_rate": learning_rate}
    row |= {"arm": "lossy" if rate else "no loss", "loss_rate": rate, "mean": accuracy}
    config = TrainConfig(loss_rate=rate, tensor_parallel_size=4, **settings)
    return row | {"difference": -fall, "low": -fall - 0.01, "high": -fall + 0.01}, config


def tabled(arms):
    rows, configs = zip(*arms, strict=True)
    return pd.DataFrame(rows), configs


def test_only_networks_that_cost_something_and_were_trained_longer_stay():
    first = [
        an_arm(100, 0.0, 0.6),
        an_arm(400, 0.0, 0.7),
        an_arm(100, 0.1, 0.5, fall=0.1),  # never trained longer
        an_arm(400, 0.01, 0.7, fall=0.002),  # costs too little
        an_arm(400, 0.3, 0.6, fall=0.1, learning_rate=4e-3),  # another learning rate
        an_arm(400, 0.1, 0.5, fall=0.2, repair="hadamard(64)"),  # repaired
        an_arm(400, 0.1, 0.5, fall=0.2, loss_type="correlated(shared=1)"),  # lost together
        an_arm(400, 0.2, 0.65, fall=0.05, reliable_gather=False),
    ]
    second = [
        an_arm(400, 0.2, 0.5, fall=0.2, reliable_gather=False),  # the first experiment counts
        an_arm(400, 0.2, 0.64, fall=0.06, algorithm="ring"),
        an_arm(400, 0.2, 0.6, fall=0.1, algorithm="ring", reliable_gather=False),
    ]
    found = falls_by_length([tabled(first), tabled(second)], learning_rate=1e-3)
    falls = dict(zip(found["network"], found["fall"], strict=True))
    assert falls == {"20 %, both phases": 0.05, "20 %, ring, reduce phase": 0.06, "20 %, ring, both phases": 0.1}
    assert falls_by_length([tabled([first[2]])], learning_rate=4e-3).empty


def runs_of(network, accuracies):
    """Runs with (length, seed) accuracies."""
    return [
        {"network": network, "max_steps": steps, "seed": seed, "accuracy_lossy": accuracy}
        for steps, by_seed in accuracies.items()
        for seed, accuracy in enumerate(by_seed)
    ]


LOSSLESS_RUNS = runs_of(None, {100: [0.6, 0.5], 400: [0.7, 0.6], 1600: [0.8, 0.7]})


def only(found):
    (network,) = found.values()
    return network


def test_slowdowns_are_read_off_each_seed_s_lossless_runs():
    lossy = runs_of("lossy", {100: [0.4, 0.4], 400: [0.65, 0.55], 1600: [0.7, 0.6]})
    found = only(slowdowns(pd.DataFrame([*LOSSLESS_RUNS, *lossy])))
    # half way between 100 and 400 steps lie 200; nothing lossless is as bad as 0.4
    assert [(row["steps"], row["seeds"]) for row in found["slowdown"]] == [(400, 2), (1600, 2)]
    assert [row["value"] for row in found["slowdown"]] == pytest.approx([2.0, 4.0])
    assert found["growth"] == [pytest.approx({"steps": 1600, "seeds": 2, "value": 2.0, "low": 2.0, "high": 2.0})]
    lossy = runs_of("lossy", {400: [0.65, 0.525], 1600: [0.7, 0.575]})  # the second seed is slower, equally at both
    found = only(slowdowns(pd.DataFrame([*LOSSLESS_RUNS, *lossy])))
    assert found["slowdown"][0]["low"] < 2 < found["slowdown"][0]["high"]
    assert found["growth"][0]["low"] == pytest.approx(2.0), "it is paired"
    lossy = runs_of("lossy", {400: [0.65, 0.3], 1600: [0.7, 0.6]})  # the second is worse than all its lossless runs
    assert slowdowns(pd.DataFrame([*LOSSLESS_RUNS, *lossy])) == {}, "one seed has no interval"


def test_each_length_is_paired_with_the_next():
    lossy = runs_of("lossy", {100: [0.6, 0.5], 400: [0.65, 0.53], 1600: [0.78, 0.66]})
    found = only(slowdowns(pd.DataFrame([*LOSSLESS_RUNS, *lossy])))
    assert [(row["steps"], row["value"]) for row in found["shrunk"]] == [
        (400, pytest.approx(-0.06)),
        (1600, pytest.approx(0.03)),
    ]
    assert found["shrunk"][1]["high"] == pytest.approx(0.03), "seeds differ, and alike at both"
    assert [row["steps"] for row in found["growth"]] == [400, 1600]


def test_where_lossless_training_overfits_a_slowdown_has_no_meaning():
    lossless = [*LOSSLESS_RUNS, *runs_of(None, {6400: [0.75, 0.65]})]
    lossy = runs_of("lossy", {400: [0.65, 0.55], 1600: [0.7, 0.6], 6400: [0.72, 0.62]})
    found = only(slowdowns(pd.DataFrame([*lossless, *lossy])))
    assert [row["steps"] for row in found["slowdown"]] == [400, 1600]
    assert [row["steps"] for row in found["growth"]] == [1600]
    assert [(row["steps"], row["value"]) for row in found["shrunk"]] == [
        (1600, pytest.approx(-0.05)),
        (6400, pytest.approx(0.07)),
    ]


def test_the_best_length_is_that_of_the_seeds_that_have_all():
    """Two weaker seeds lack the longest training, which must not look best because of that."""
    lossless = [*LOSSLESS_RUNS, *runs_of(None, {6400: [0.79, 0.69]})]
    lossless += [
        {**run, "seed": seed, "accuracy_lossy": run["accuracy_lossy"] - 0.3}
        for seed in (2, 3)
        for run in LOSSLESS_RUNS
        if run["seed"] == 0
    ]
    lossy = runs_of("lossy", {400: [0.65, 0.55], 1600: [0.8, 0.6], 6400: [0.72, 0.62]})
    found = only(slowdowns(pd.DataFrame([*lossless, *lossy])))
    assert [row["steps"] for row in found["slowdown"]] == [400, 1600]
    assert found["slowdown"][1]["value"] == pytest.approx((1 * 4) ** 0.5), "a score of the best length is reached there"


def test_changes_in_the_longest_training_are_paired_by_seed():
    lossless = [*LOSSLESS_RUNS, *runs_of(None, {6400: [0.79, 0.69]}), *runs_of("short", {400: [0.1, 0.1]})]
    lossy = runs_of("lossy", {1600: [0.7, 0.5, 0.1], 6400: [0.72, 0.52]})
    found = changes_in_longest_training(pd.DataFrame([*lossless, *lossy]), "accuracy_lossy")
    assert [(row["network"], row["steps"], row["seeds"]) for row in found] == [(None, 6400, 2), ("lossy", 6400, 2)]
    assert [row["value"] for row in found] == pytest.approx([-0.01, 0.02])
    assert found[0]["high"] == pytest.approx(-0.01)


def test_a_seed_without_the_longest_training_counts_at_the_others():
    lossless = [*LOSSLESS_RUNS, *runs_of(None, {6400: [0.9, 0.8]})]
    lossless += [{**run, "seed": 2} for run in lossless if run["seed"] == 0 and run["max_steps"] < 6400]
    lossy = runs_of("lossy", {400: [0.65, 0.55, 0.65], 1600: [0.7, 0.6, 0.7], 6400: [0.8, 0.7]})
    found = only(slowdowns(pd.DataFrame([*lossless, *lossy])))
    assert [(row["steps"], row["seeds"]) for row in found["slowdown"]] == [(400, 3), (1600, 3), (6400, 2)]
    assert [row["seeds"] for row in found["growth"]] == [3, 2]
    assert [row["value"] for row in found["slowdown"]] == pytest.approx([2.0, 4.0, 4.0])


def test_gain_from_longer_training_is_paired_by_seed(record):
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
    table = table.assign(arm=(table["loss_rate"] > 0).map({True: "lossy", False: "no loss"}))
    (found,) = gain_from_longer_training(table)
    assert (found["task"], found["steps"], found["longer_steps"]) == ("docstrings", 10, 30)
    assert found["gain"]["value"] == pytest.approx(0.2 * 0.2)
    assert found["gain"]["high"] - found["gain"]["low"] == pytest.approx(0, abs=1e-9), "seeds differ, and alike at both"
