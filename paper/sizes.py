"""Does tolerance depend on a model's size, or on its pretraining?"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from lossytp.network.routes import Wire
from lossytp.study.statistics import Estimate, t_interval
from lossytp.study.style import COLUMN, estimates
from lossytp.study.tables import final_accuracies
from lossytp.training.config import PretrainConfig, TrainConfig
from lossytp.training.loop import run
from lossytp.training.record import read_record
from lossytp.training.shapes import shape_of
from lossytp.training.text import text_pattern
from paper.comparisons import json_rows
from paper.predictions import InferenceProbe
from paper.study import MILLION, POINTS, Claim, Results, Study, claim, real_row, row_of, rows_of

FINE_TUNED = "fine_tuned_"  # prefix of a run's folder in the pretrained model's; the loss rate and the seed follow
MODEL = ["model_name", "parameters", "tokens"]


def falls_of_models(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the fall in accuracy of each model and loss rate, paired by seed.

    Args:
        runs: from `fine_tuned`, of all models.

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
        draws: from `rises_in_inference`, of all models.
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


# Measure, without training, how much a run's packet losses raise the pretrained model's cross-entropy.
#
# It takes seconds an arm.
#
# Shapes: N texts, B texts of a batch, T tokens a text, S draws of losses.


# Pretrain a model, and measure how much loss it bears: in inference, and fine-tuned.
#
# Models compare only if the bytes that are lost together are the same share of a token. So a packet carries a third of
# a token's activations at every size.


PACKETS_PER_TOKEN = 3
BYTES = {True: 2, False: 4}  # of an activation, by whether training uses bf16


def rises_in_inference(
    config: PretrainConfig,
    settings: Mapping[str, Any],
    *,
    loss_rates: Sequence[float],
    draws: int,
    known: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Return how much losses raise the pretrained model's cross-entropy, in packets of two sizes.

    Args:
        config: the finished pretraining of a named shape.
        settings: of fine-tuning; its batches have the probe's shape.
        loss_rates: of the evaluations.
        draws: of losses.
        known: an earlier table. If it has all rows of this very model, they are returned: results keep no models.

    Returns:
        One row per draw: `run` (the name of the run's folder), `model_name`, `tokens` (of pretraining), `pretrained`
        (the cross-entropy in the record), `lossless` (the cross-entropy on the probe's text without losses),
        `mtu_bytes`, `whole_packets` (True for packets of 1500 bytes), `loss_rate`, `draw`, and `rise` (nats a token).

    Raises:
        ValueError: if the model is not pretrained yet.
    """
    folder = Path(config.output.output_dir)
    record = read_record(folder)
    if record is None:
        raise ValueError(f"{folder} has no record: pretrain the model first")
    pretrained = record["final"]["cross_entropy_clean"]
    asked = [(whole, rate, draw) for whole in (False, True) for rate in loss_rates for draw in range(draws)]
    if known is not None:
        same = (known["run"] == folder.name) & np.isclose(known["pretrained"], pretrained, rtol=1e-5)
        ours = known[same].set_index(["whole_packets", "loss_rate", "draw"])
        if set(asked) <= set(ours.index):
            return ours.loc[asked].reset_index()[list(known)]
    fine = TrainConfig.from_dict({**settings, "model_name": config.output.output_dir, "bf16": False})
    text = text_pattern(config)
    probe = InferenceProbe(
        config.output.output_dir, batch_size=fine.optimizer.batch_size, length=fine.data.max_length, text=text
    )
    rows = []
    for whole in (False, True):
        size = TrainConfig.defaults()["mtu_bytes"] if whole else packet_bytes(config, bf16=False)
        for rate in loss_rates:
            network = TrainConfig.from_dict({**fine.as_dict(), "loss_rate": rate, "mtu_bytes": size})
            shared = {"run": folder.name, "model_name": config.model_name, "tokens": config.tokens}
            shared |= {"pretrained": pretrained, "lossless": probe.lossless}
            shared |= {"mtu_bytes": size, "whole_packets": whole, "loss_rate": rate}
            rows += [shared | {"draw": draw, "rise": rise} for draw, rise in enumerate(probe.rises(network, draws))]
    return pd.DataFrame(rows)


def fine_tuned(
    config: PretrainConfig, settings: Mapping[str, Any], *, loss_rates: Sequence[float], seeds: int
) -> pd.DataFrame:
    """Return how accurate the pretrained model is once it is fine-tuned over lossy networks.

    Runs that are finished are not repeated. Their folders lie in the pretrained model's.

    Args:
        config: the pretraining of a named shape; it runs unless it is finished.
        settings: of fine-tuning.
        loss_rates: of training and evaluation.
        seeds: of fine-tuning.

    Returns:
        One row per run: `model_name`, `parameters`, `tokens` of pretraining, `pretrained`, the cross-entropy of the
        pretrained model, `loss_rate`, `mtu_bytes`, `seed`, and the run's `final_accuracies`.

    Raises:
        ValueError: if a folder holds a run with other settings, or the model of a missing run was deleted.
    """
    pretrained = run(config)
    shared: dict[str, Any] = {"model_name": config.model_name, "parameters": pretrained["parameters"]}
    shared |= {"tokens": config.tokens, "pretrained": pretrained["final"]["cross_entropy_clean"]}
    size = packet_bytes(config, bf16=settings.get("bf16", False))
    rows = []
    for seed in range(seeds):
        for rate in loss_rates:
            folder = f"{config.output.output_dir}/{FINE_TUNED}{rate:g}_seed{seed}"
            here = {"model_name": config.output.output_dir, "output_dir": folder}
            values = {**settings, **here, "loss_rate": rate, "mtu_bytes": size, "seed": seed}
            record = read_record(Path(folder))  # readable without the model, which results do not keep
            if record is None:
                record = run(TrainConfig.from_dict(values))
            _check_settings(folder, record, values)
            rows.append(shared | {"loss_rate": rate, "mtu_bytes": size, "seed": seed} | final_accuracies(record))
    return pd.DataFrame(rows)


def _check_settings(folder: str, record: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise ValueError if a finished run has other settings, but for the place of its model."""
    for name, value in values.items():
        if name != "model_name" and record["config"].get(name, value) != value:
            raise ValueError(
                f"{folder} holds a run with {name} = {record['config'][name]!r}, not {value!r}: delete this folder, or "
                "give another output_dir"
            )


def packet_bytes(config: PretrainConfig, *, bf16: bool) -> int:
    """Return the size of a packet that carries a third of a token's activations, header included.

    Raises:
        ValueError: if the model's shape is not known by its name.
    """
    shape = shape_of(config.model_name)
    if shape is None:
        raise ValueError(f"model_name = {config.model_name!r} has no known width: give a named shape")
    return Wire.header_bytes + BYTES[bf16] * round(shape.width / PACKETS_PER_TOKEN)


# Train, and evaluate the last model over other networks than that of its training.


# Draw what losses cost models of several sizes, and models pretrained on several numbers of tokens.


def cost_of_models(rises: pd.DataFrame, falls: pd.DataFrame) -> Figure:
    """Draw the rise in inference and the fall after fine-tuning, one line per loss rate.

    They are drawn against the number of parameters, at equal tokens. If a size was pretrained on several numbers of
    tokens, they are also drawn against the number of tokens, at that size.

    Args:
        rises: from `rises_of_models`, of packets of one size.
        falls: from `falls_of_models`.
    """
    columns = [("parameters", of_equal_tokens, "parameters, millions"), ("tokens", of_one_size, "tokens, millions")]
    columns = [each for each in columns if len(each[1](rises))]
    figure, axes_CX = plt.subplots(
        2, len(columns), figsize=(COLUMN, 3.2), layout="constrained", squeeze=False, sharex="col", sharey="row"
    )
    rates = sorted({*rises["loss_rate"], *falls["loss_rate"]})
    costs = (
        (rises, "rise", 1, "rise in inference,\nnats a token"),
        (falls, "fall", POINTS, "fall, fine-tuned,\npoints"),
    )
    for axes_X, (table, cost, scale, name) in zip(axes_CX, costs, strict=True):
        for ax, (x, models, _) in zip(axes_X, columns, strict=True):
            ours = models(table)
            for number, rate in enumerate(rates):
                rows = ours[ours["loss_rate"] == rate].sort_values(x)
                if len(rows):
                    _line(ax, rows, x, cost, scale, number, f"{POINTS * rate:g} %")
            ax.set_xscale("log")
            ax.set_xticks(ticks := sorted(ours[x].unique()), [f"{each / MILLION:.2g}" for each in ticks])
            ax.minorticks_off()
            ax.margins(x=0.25)
        axes_X[0].set_ylabel(name)
    axes_CX[0, 0].set_yscale("log")
    axes_CX[0, 0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes_CX[0, 0].yaxis.set_major_formatter(FuncFormatter(lambda rise, _: f"{rise:g}"))
    axes_CX[0, 0].yaxis.set_minor_locator(NullLocator())
    axes_CX[1, 0].set_ylim(bottom=0)
    for ax, (_, _, name) in zip(axes_CX[1], columns, strict=True):
        ax.set_xlabel(name)
    return figure


def _line(ax: Axes, rows: pd.DataFrame, x: str, cost: str, scale: float, number: int, name: str) -> None:
    """Plot one loss rate's means with their intervals, and its name beside the last one."""
    values = scale * rows[[cost, "low", "high"]]
    estimates(ax, rows[x], values, number, linestyle="-")
    ax.annotate(
        name, (rows[x].iloc[-1], values[cost].iloc[-1]), xytext=(4, 0), textcoords="offset points", color=f"C{number}",
        fontsize=6, va="center",
    )  # fmt: skip


def sizes(study: Study) -> dict[str, Any]:
    """Return what losses cost models of several sizes, and models pretrained on several numbers of tokens."""
    folder = study.results / "sizes"
    if not (folder / "fine_tuning.csv").is_file():
        return {}
    runs, draws = pd.read_csv(folder / "fine_tuning.csv"), pd.read_csv(folder / "inference.csv")
    falls, table = falls_of_models(runs), rises_of_models(draws, runs)
    study.draw(cost_of_models(table[~table["whole_packets"]], falls), "sizes")
    shared = int(of_equal_tokens(runs)["tokens"].iloc[0])
    folders = study.results.glob(f"runs/*/{FINE_TUNED}*")  # in the pretrained model's, so no experiment has them
    seconds = sum(record["timing"]["total_seconds"] for folder in folders if (record := read_record(folder)))
    found = {"tokens": shared, "falls": json_rows(falls), "rises": json_rows(table), "core_hours": seconds / 3600}
    return {"sizes": {**found, "exponents": exponents(runs, draws)}}


# Claims about a model's size, and about how long it is pretrained.


@claim
def rises_shrink_with_size(results: Results) -> Claim:
    """Require that the exponent of the rise at 10 % is below 0 with its interval, in packets of both kinds.

    The two largest models must differ by more than the others. At 30 % the exponents must be closer to 0, with
    intervals below it. At 3 % both intervals must hold 0.
    """
    costs = ("rise", "rise, whole packets")
    numbers = {cost: _claimed_exponent(results, "parameters", cost, 0.1)["high"] for cost in costs}
    at_30 = {cost: _claimed_exponent(results, "parameters", cost, 0.3) for cost in costs}
    smaller = all(_claimed_exponent(results, "parameters", cost, 0.1)["value"] < at_30[cost]["value"] for cost in costs)
    below = smaller and all(row["high"] < 0 for row in at_30.values())
    at_3 = [_claimed_exponent(results, "parameters", cost, 0.03) for cost in costs]
    uncertain = all(row["low"] <= 0 <= row["high"] for row in at_3)
    shared = results["sizes"]["tokens"]
    rows = [row for row in _small_packets(results) if row["tokens"] == shared]
    first, *_, last_but_one, last = (row["rise"] for row in sorted(rows, key=lambda row: row["parameters"]))
    holds = max(numbers.values()) < 0 and last_but_one - last > first - last_but_one > 0 and below and uncertain
    return Claim(holds, numbers | {"smallest": first, "last but one": last_but_one, "largest": last})


@claim
def falls_shrink_with_size(results: Results) -> Claim:
    """Require that mean falls after fine-tuning shrink from size to size, to a power below 0 with its interval."""
    row = _claimed_exponent(results, "parameters", "fall", 0.3)
    rows = rows_of(results["sizes"]["falls"], tokens=results["sizes"]["tokens"])
    falls = [each["fall"] for each in sorted(rows, key=lambda each: each["parameters"])]
    shrink = falls == sorted(falls, reverse=True)
    return Claim(shrink and row["high"] < 0, {end: row[end] for end in ("value", "low", "high")})


@claim
def rises_grow_with_tokens(results: Results) -> Claim:
    """Require that the rise at 10 % grows with the tokens to a power above 1, in packets of both kinds.

    The power's interval must lie above 1. Each step to more tokens must multiply the rise by less than the last one.
    """
    numbers = {cost: _claimed_exponent(results, "tokens", cost, 0.1)["low"] for cost in ("rise", "rise, whole packets")}
    usual = _usual(results)["model_name"]
    rows = sorted((row for row in _small_packets(results) if row["model_name"] == usual), key=lambda row: row["tokens"])
    growth = [later["rise"] / earlier["rise"] for earlier, later in pairwise(rows)]
    holds = min(numbers.values()) > 1 and growth == sorted(growth, reverse=True)
    return Claim(holds, numbers | {"first growth": growth[0], "last growth": growth[-1]})


@claim
def falls_are_not_shown_to_grow_with_tokens(results: Results) -> Claim:
    """Require that mean falls after fine-tuning grow with the tokens, but that the exponent's interval holds 0."""
    row = _claimed_exponent(results, "tokens", "fall", 0.3)
    usual = _usual(results)["model_name"]
    rows = sorted((each["tokens"], each["fall"]) for each in results["sizes"]["falls"] if each["model_name"] == usual)
    falls = [fall for _, fall in rows]
    numbers = {end: row[end] for end in ("value", "low", "high")} | {"least": falls[0], "most": falls[-1]}
    return Claim(row["low"] <= 0 < row["high"] and falls == sorted(falls), numbers)


@claim
def the_longest_trained_falls_most(results: Results) -> Claim:
    """Require that the study's usual model falls more than its shape after the tokens that all sizes saw."""
    usual, shared = _usual(results), results["sizes"]["tokens"]
    fewer = row_of(results["sizes"]["falls"], model_name=usual["model_name"], tokens=shared)["high"]
    numbers = {"usual model, low": -POINTS * usual["high"], "fewer tokens, high": POINTS * fewer}
    return Claim(-usual["high"] > fewer, numbers)


@claim
def size_does_not_explain_the_real_model(results: Results) -> Claim:
    """Require that the real model's median block rises at least four times as much as any size, at 3 % loss.

    Packets have 1500 bytes in both.
    """
    real = real_row(results, repair="zero", loss_rate=0.03)["median"]
    most = max(row["rise"] for row in rows_of(results["sizes"]["rises"], whole_packets=True, loss_rate=0.03))
    return Claim(real > 4 * most, {"real model": real, "any size": most})


def _usual(results: Results) -> dict[str, Any]:
    """Return what 30 % loss costs the study's usual model, in packets of a third of a token."""
    rows = results["comparisons"]["01_tolerance_of_small_packets"]
    return row_of(rows, task="docstrings", arm="packets of 216 bytes", loss_rate=0.3)


def _small_packets(results: Results) -> list[dict[str, Any]]:
    """Return the rises at 10 % in packets of a third of a token."""
    return rows_of(results["sizes"]["rises"], whole_packets=False, loss_rate=0.1)


def _claimed_exponent(results: Results, against: str, cost: str, loss_rate: float) -> dict[str, Any]:
    row = row_of(results["sizes"]["exponents"], against=against, cost=cost, loss_rate=loss_rate)
    return {name: math.nan if value is None else value for name, value in row.items()}  # no claim holds of nan
