"""The summary of the study's runs, arms with enough seeds, and claims that cannot be checked."""

from pathlib import Path

import pandas as pd
import pytest

import paper.tolerance  # noqa: F401 -- registers its claims
from paper.study import Study, check_claims, summarise_runs


def test_summarise_runs_counts_each_run_once_and_no_packets_of_controls(study, record):
    control = record(loss_rate=0.1, seed=7, accuracy=0.5, control="elements")
    ran, with_control = summarise_runs(study), summarise_runs([*study, control])
    assert (ran["cells"], ran["packets"], ran["hours"]) == (15, 15_000, pytest.approx(0.15))
    assert (with_control["cells"], with_control["packets"]) == (16, 15_000)
    assert summarise_runs([*study, *study[:4]]) == ran


def test_arms_with_seeds_leaves_out_arms_with_too_few():
    """A third seed makes an interval; the same seed at another rate does not count."""
    seeds = {("whole", 0.1): (0, 1, 2), ("begun", 0.1): (0, 1), ("begun", 0.2): (2,)}
    rows = [{"arm": arm, "loss_rate": rate, "seed": seed} for (arm, rate), each in seeds.items() for seed in each]
    study = Study("paper", Path(), Path(), Path(), _read={"asked": (None, pd.DataFrame(rows), [])})
    assert study.arms_with_seeds("asked").to_dict("list") == {
        "arm": ["whole"] * 3, "loss_rate": [0.1] * 3, "seed": [0, 1, 2],
    }  # fmt: skip


def test_a_claim_of_a_missing_arm_is_an_error_and_not_true():
    with pytest.raises(ValueError, match=r"small_losses_\w+ cannot be checked .*KeyError"):
        check_claims("tolerance", {})
