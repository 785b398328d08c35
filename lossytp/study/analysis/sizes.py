"""Answer whether tolerance of losses depends on a model's size, from the tables of `measurements.sizes`."""

from typing import Any

import numpy as np
import pandas as pd

from lossytp.study.statistics import Estimate, t_interval

SIZE = ["model_name", "parameters"]


def falls_by_size(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the fall in accuracy of each size and loss rate, paired by seed.

    Args:
        runs: from `measurements.sizes.fine_tuned`, of all sizes.

    Returns:
        Columns `model_name`, `parameters`, `pretrained`, `loss_rate`, `seeds`, `accuracy`, the mean without losses, and
        `fall`, as a share, with Student's 95 % interval as `low` and `high`.
    """
    rows: list[dict[str, Any]] = []
    for keys, ours in _falls(runs).groupby([*SIZE, "pretrained", "loss_rate"], sort=False):
        fall = t_interval(ours["fall"].to_numpy())
        named = dict(zip([*SIZE, "pretrained", "loss_rate"], keys, strict=True))
        rows.append(
            named
            | {"seeds": len(ours), "accuracy": float(ours["lossless"].mean())}
            | {"fall": fall.value, "low": fall.low, "high": fall.high}
        )
    return pd.DataFrame(rows)


def rises_by_size(draws: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the mean rise of each size, packet size and loss rate, with Student's 95 % interval over draws.

    Args:
        draws: from `measurements.sizes.rises_in_inference`, of all sizes.
        runs: as for `falls_by_size`, for the numbers of parameters.

    Returns:
        Columns `model_name`, `lossless`, `whole_packets`, `loss_rate`, `parameters`, `rise`, `low` and `high`.
    """
    keys = ["model_name", "lossless", "whole_packets", "loss_rate"]
    by_size = draws.groupby(keys, sort=False)["rise"]
    found = pd.DataFrame(list(by_size.groups), columns=keys).join(_parameters(runs), on="model_name")
    found[["rise", "low", "high"]] = [t_interval(values.to_numpy()) for _, values in by_size]
    return found


def exponents(runs: pd.DataFrame, draws: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the exponents of costs against the number of parameters.

    Each seed, or each draw, has its own exponent: the slope of a line through the logarithms over sizes. The interval
    is Student's over seeds, or over draws.

    Args:
        runs: as for `falls_by_size`.
        draws: as for `rises_by_size`.

    Returns:
        A mapping for each cost: `cost` ("fall", "rise", or "rise, whole packets"), `loss_rate`, and the exponent's
        `value`, `low` and `high`. If a fall or a rise is not positive, they are missing.
    """
    parameters = _parameters(runs)
    several = {
        "fall": _falls(runs).rename(columns={"fall": "cost", "seed": "repeat"}),
        "rise": draws[~draws["whole_packets"]].rename(columns={"rise": "cost", "draw": "repeat"}),
        "rise, whole packets": draws[draws["whole_packets"]].rename(columns={"rise": "cost", "draw": "repeat"}),
    }
    found: list[dict[str, Any]] = []
    for name, costs in several.items():
        for rate in sorted(costs["loss_rate"].unique()):
            ours = costs[costs["loss_rate"] == rate].pivot(index="repeat", columns="model_name", values="cost")
            found.append({"cost": name, "loss_rate": float(rate), **_exponent(ours, parameters).as_json()})
    return found


def _parameters(runs: pd.DataFrame) -> "pd.Series[int]":
    return runs.drop_duplicates("model_name").set_index("model_name")["parameters"]


def _falls(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the lossy runs with `lossless`, the accuracy of their seed and size without losses, and `fall`."""
    key = [*SIZE, "seed"]
    lossless = runs[runs["loss_rate"] == 0].set_index(key)["accuracy_lossy"].rename("lossless")
    lossy = runs[runs["loss_rate"] > 0].join(lossless, on=key)
    return lossy.assign(fall=lossy["lossless"] - lossy["accuracy_lossy"])


def _exponent(table: pd.DataFrame, parameters: "pd.Series[int]") -> Estimate:
    """Return the mean over rows of the slope of log values against log parameters, a column a model."""
    x = np.log(parameters[table.columns].to_numpy(dtype=float))
    with np.errstate(invalid="ignore", divide="ignore"):
        y = np.log(table.to_numpy(dtype=float))
    slopes = ((x - x.mean()) * y).sum(axis=1) / ((x - x.mean()) ** 2).sum()
    return t_interval(slopes)
