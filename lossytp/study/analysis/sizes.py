"""Answer whether tolerance of losses depends on a model's size or on its pretraining.

The tables are those of `measurements.sizes`. Sizes are compared at equal tokens, and numbers of tokens at one size.
"""

from typing import Any

import numpy as np
import pandas as pd

from lossytp.study.statistics import Estimate, t_interval

FINE_TUNED = "fine_tuned_"  # prefix of a run's folder in the pretrained model's; the loss rate and the seed follow
MODEL = ["model_name", "parameters", "tokens"]


def falls_of_models(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the fall in accuracy of each model and loss rate, paired by seed.

    Args:
        runs: from `measurements.sizes.fine_tuned`, of all models.

    Returns:
        Columns `model_name`, `parameters`, `tokens`, `pretrained`, `loss_rate`, `seeds`, `accuracy`, the mean without
        losses, and `fall`, as a share, with Student's 95 % interval as `low` and `high`.
    """
    rows: list[dict[str, Any]] = []
    keys = [*MODEL, "pretrained", "loss_rate"]
    for values, ours in _falls(runs).groupby(keys, sort=False):
        fall = t_interval(ours["fall"].to_numpy())
        measured = {"seeds": len(ours), "accuracy": float(ours["lossless"].mean())}
        measured |= {"fall": fall.value, "low": fall.low, "high": fall.high}
        rows.append(dict(zip(keys, values, strict=True)) | measured)
    return pd.DataFrame(rows)


def rises_of_models(draws: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the mean rise of each model, packet size and loss rate, with Student's 95 % interval over draws.

    Args:
        draws: from `measurements.sizes.rises_in_inference`, of all models.
        runs: as for `falls_of_models`, for the numbers of parameters.

    Returns:
        Columns `model_name`, `tokens`, `lossless`, `whole_packets`, `loss_rate`, `parameters`, `rise`, `low`, `high`.
    """
    keys = ["model_name", "tokens", "lossless", "whole_packets", "loss_rate"]
    by_model = draws.groupby(keys, sort=False)["rise"]
    found = pd.DataFrame(list(by_model.groups), columns=keys).join(_parameters(runs), on="model_name")
    found[["rise", "low", "high"]] = [t_interval(values.to_numpy()) for _, values in by_model]
    return found


def of_equal_tokens(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the models that saw the number of tokens that most shapes share."""
    shapes = table.groupby("tokens")["model_name"].nunique()
    return table[table["tokens"] == shapes.idxmax()]


def of_one_size(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the shape that was pretrained on most numbers of tokens; none if all saw the same."""
    several = table.groupby("model_name")["tokens"].nunique()
    return table[(table["model_name"] == several.idxmax()) & (several.max() > 1)]


def exponents(runs: pd.DataFrame, draws: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the exponents of costs against the number of parameters, and against that of tokens.

    An exponent is the slope of a line through the logarithms of mean costs over models. Its interval is Student's over
    the jackknife's values, which leave out one seed, or one draw, at a time (Tukey, 1958). A seed that a model lacks is
    left out.

    Args:
        runs: as for `falls_of_models`.
        draws: as for `rises_of_models`.

    Returns:
        A mapping for each: `against` ("parameters" or "tokens"), `cost` ("fall", "rise", or "rise, whole packets"),
        `loss_rate`, and the exponent's `value`, `low` and `high`, missing if a mean cost is not positive.
    """
    draws = draws.join(_parameters(runs), on="model_name").rename(columns={"rise": "cost", "draw": "repeat"})
    several = {
        "fall": _falls(runs).rename(columns={"fall": "cost", "seed": "repeat"}),
        "rise": draws[~draws["whole_packets"]],
        "rise, whole packets": draws[draws["whole_packets"]],
    }
    found: list[dict[str, Any]] = []
    for against, models in (("parameters", of_equal_tokens), ("tokens", of_one_size)):
        for name, costs in several.items():
            ours = models(costs)
            for rate in sorted(ours["loss_rate"].unique()):
                table = ours[ours["loss_rate"] == rate].pivot(index="repeat", columns=against, values="cost")
                named = {"against": against, "cost": name, "loss_rate": float(rate)}
                found.append(named | _exponent(table).as_json())
    return found


def _parameters(runs: pd.DataFrame) -> "pd.Series[int]":
    return runs.drop_duplicates("model_name").set_index("model_name")["parameters"]


def _falls(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the lossy runs with `lossless`, the accuracy of their seed and model without losses, and `fall`."""
    key = [*MODEL, "seed"]
    lossless = runs[runs["loss_rate"] == 0].set_index(key)["accuracy_lossy"].rename("lossless")
    lossy = runs[runs["loss_rate"] > 0].join(lossless, on=key)
    return lossy.assign(fall=lossy["lossless"] - lossy["accuracy_lossy"])


def _exponent(table: pd.DataFrame) -> Estimate:
    """Return the slope of the logarithms of the columns' means against those of their names; rows are repeats."""
    costs_RM = table.dropna().to_numpy(dtype=float)
    x = np.log(table.columns.to_numpy(dtype=float))

    def slope(means_M: np.ndarray) -> float:
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(((x - x.mean()) * np.log(means_M)).sum() / ((x - x.mean()) ** 2).sum())

    repeats, whole = len(costs_RM), slope(costs_RM.mean(axis=0))
    without = np.array([slope(np.delete(costs_RM, row, axis=0).mean(axis=0)) for row in range(repeats)])
    half = t_interval(repeats * whole - (repeats - 1) * without).half_width
    return Estimate(whole, whole - half, whole + half)
