"""The finished runs of a profile's experiments."""

from pathlib import Path

import pandas as pd
import pytest

from paper.study import Study

pytestmark = pytest.mark.slow


def test_arms_with_too_few_seeds_are_left_out():
    """A third seed makes an interval; the same seed at another rate does not count."""
    seeds = {("whole", 0.1): (0, 1, 2), ("begun", 0.1): (0, 1), ("begun", 0.2): (2,)}
    rows = [{"arm": arm, "loss_rate": rate, "seed": seed} for (arm, rate), each in seeds.items() for seed in each]
    study = Study("paper", Path(), {}, {"asked": pd.DataFrame(rows)}, {})
    assert study.arms_with_seeds("asked").to_dict("list") == {
        "arm": ["whole"] * 3, "loss_rate": [0.1] * 3, "seed": [0, 1, 2],
    }  # fmt: skip
    assert study.arms_with_seeds("not in this profile").empty


def test_each_row_of_a_comparison_has_its_own_trainings_configuration():
    """Runs without losses of several models and learning rates share an arm's name."""
    root = Path(__file__).parents[2]
    study = Study.read(root / "results" / "paper", root / "notebooks" / "experiments", "paper")
    for name in ("01_training", "10_carry_over"):
        rows = study.comparisons[name]
        for row, config in zip(rows.itertuples(), study.configs(name), strict=True):
            asked = (row.task, row.model_name, row.max_steps, row.learning_rate, row.loss_rate)
            assert asked == (
                config.data.dataset,
                config.model_name,
                config.optimizer.max_steps,
                config.optimizer.learning_rate,
                config.network.loss_rate,
            )
