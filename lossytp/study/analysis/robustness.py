"""Answer whether training under packet loss makes a model robust to it, from evaluations at several loss rates."""

import pandas as pd

from lossytp.study.comparisons import compare_arms

KEY = ["task", "trained_at", "evaluated_at", "seed"]


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """Compute the gain in accuracy of training at a loss rate over training without losses, paired by seed.

    Args:
        table: one row per evaluation, with `task`, `trained_at`, `evaluated_at`, `seed` and `accuracy`. Some models
            were trained at rate 0.

    Returns:
        One row for each task, rate of evaluation and rate of training: `task`, `evaluated_at`, `trained_at`, and the
        columns of `comparisons.compare_arms` from `seeds` on.

    Raises:
        ValueError: if no model was trained at 0, or two rows share task, rates and seed.
    """
    twice = table[table.duplicated(KEY)]
    if len(twice):
        task, trained_at, rate, seed = twice.iloc[0][KEY]
        raise ValueError(
            f"{task} is evaluated twice at {rate:g}, trained at {trained_at:g}, seed {seed}: leave one out"
        )
    runs = table.assign(arm="trained at " + table["trained_at"].map("{:g}".format), loss_rate=table["trained_at"])
    compared = compare_arms(runs, reference="trained at 0", outcome="accuracy", within=("task", "evaluated_at"))
    return compared.drop(columns="arm").rename(columns={"loss_rate": "trained_at"})


def evaluation_changes(table: pd.DataFrame) -> pd.DataFrame:
    """Compute how losses in evaluation change each model's accuracy, as input to `gains`.

    Args:
        table: as for `gains`; every model is evaluated at 0.

    Returns:
        The rows evaluated at other rates, their `accuracy` less the same model's at 0.
    """
    key = ["task", "trained_at", "seed"]
    without = table[table["evaluated_at"] == 0].set_index(key)["accuracy"].rename("without")
    lossy = table[table["evaluated_at"] > 0].join(without, on=key)
    return lossy.assign(accuracy=lossy["accuracy"] - lossy["without"])[table.columns]
