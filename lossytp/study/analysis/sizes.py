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


def rises_by_size(draws: pd.DataFrame, parameters: "pd.Series[int]") -> pd.DataFrame:
    """Return the mean rise of each size, packet size and loss rate, with Student's 95 % interval over draws.

    Args:
        draws: from `measurements.sizes.rises_in_inference`, of all sizes.
        parameters: by `model_name`.

    Returns:
        Columns `model_name`, `parameters`, `lossless`, `whole_packets`, `loss_rate`, `rise`, `low` and `high`.
    """
    rows: list[dict[str, Any]] = []
    keys = ["model_name", "lossless", "whole_packets", "loss_rate"]
    for values, ours in draws.groupby(keys, sort=False):
        named = dict(zip(keys, values, strict=True))
        rise = t_interval(ours["rise"].to_numpy())
        size = {"parameters": int(parameters[named["model_name"]])}
        rows.append(named | size | {"rise": rise.value, "low": rise.low, "high": rise.high})
    return pd.DataFrame(rows)


def exponents(runs: pd.DataFrame, draws: pd.DataFrame) -> dict[str, Any]:
    """Return the exponent of the cost against the number of parameters, in inference and after fine-tuning.

    Each seed, or each draw, has its own exponent: the slope of a line through the logarithms over sizes. The interval
    is Student's over seeds, or over draws.

    Args:
        runs: as for `falls_by_size`.
        draws: as for `rises_by_size`.

    Returns:
        Keys "fall", by loss rate in per cent, "rise" and "rise, whole packets": each a value with `low` and `high`. A
        seed whose fall is not positive at some size has no exponent; then the value is missing.
    """
    parameters = runs.drop_duplicates("model_name").set_index("model_name")["parameters"]
    found: dict[str, Any] = {}
    for rate, ours in _falls(runs).groupby("loss_rate"):
        found[f"fall at {100 * rate:g} %"] = _exponent(
            ours.pivot(index="seed", columns="model_name", values="fall"), parameters
        )
    for (whole, rate), ours in draws.groupby(["whole_packets", "loss_rate"]):
        table = ours.pivot(index="draw", columns="model_name", values="rise")
        found[f"rise at {100 * rate:g} %" + ", whole packets" * whole] = _exponent(table, parameters)
    return {name: each.as_json() for name, each in found.items()}


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
