"""Does a model bear less loss the longer it is trained, and more the larger it is?"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from lossytp.network.routes import Wire
from lossytp.parallel.convert import parallelize
from lossytp.study.statistics import Estimate, t_interval
from lossytp.study.style import COLUMN, estimates
from lossytp.study.tables import final_accuracies
from lossytp.training.config import PretrainConfig, TrainConfig
from lossytp.training.corpus import corpus
from lossytp.training.loop import run
from lossytp.training.models import load_model, load_tokenizer
from lossytp.training.record import read_record
from lossytp.training.shapes import shape_of
from lossytp.training.text import all_blocks, text_pattern, token_losses
from paper.study import Claim, Results, Study, claim, json_rows, row_of, rows_of

FINE_TUNED = "fine_tuned_"  # prefix of a run's folder in the pretrained model's; the loss rate and the seed follow
MODEL = ["model_name", "parameters", "tokens"]
DRAWN = 0.1  # loss rate of the figure
PACKETS_PER_TOKEN = 3
BYTES = {True: 2, False: 4}  # of an activation, by whether training uses bf16


def answer(study: Study) -> dict[str, Any]:
    """Return what losses cost models of several sizes, and models pretrained on several numbers of tokens."""
    folder = study.results / "sizes"
    runs, draws = pd.read_csv(folder / "fine_tuning.csv"), pd.read_csv(folder / "inference.csv")
    falls, table = falls_of_models(runs), rises_of_models(draws, runs)
    powers = exponents(runs, draws)
    study.draw(rises_by_size(table[~table["whole_packets"]], powers), "sizes")
    shared = int(of_equal_tokens(runs)["tokens"].iloc[0])
    return {"sizes": {"tokens": shared, "falls": json_rows(falls), "rises": json_rows(table), "exponents": powers}}


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


def rises_by_size(rises: pd.DataFrame, powers: list[dict[str, Any]]) -> Figure:
    """Draw the rise at 10 % loss against tokens of pretraining, in one size, and against parameters, at equal tokens.

    Bars are 95 % intervals over draws of losses. Lines have the exponents of `exponents` as slopes.

    Args:
        rises: from `rises_of_models`, of packets of one size.
        powers: from `exponents`.
    """
    figure, axes = plt.subplots(1, 2, figsize=(COLUMN, 1.9), layout="constrained", sharey=True)
    panels = (("tokens", of_one_size, "one size"), ("parameters", of_equal_tokens, "equal tokens"))
    for number, (ax, (x, models, title)) in enumerate(zip(axes, panels, strict=True)):
        rows = models(rises[rises["loss_rate"] == DRAWN]).sort_values(x)
        estimates(ax, rows[x], rows[["rise", "low", "high"]], number)
        wanted = {"against": x, "cost": "rise", "loss_rate": DRAWN}
        (power,) = (each["value"] for each in rows_of(powers, **wanted))
        middle = np.exp(np.log(rows[[x, "rise"]].to_numpy(dtype=float)).mean(axis=0))
        ax.plot(rows[x], middle[1] * (rows[x] / middle[0]) ** power, color=f"C{number}", linewidth=0.8, zorder=0)
        ax.text(0.05, 0.93, f"exponent {power:+.2f}", transform=ax.transAxes, fontsize=6.5, va="top")
        ax.set(xscale="log", yscale="log", xlabel=f"{x}, millions", title=title)
        ax.set_xticks(ticks := sorted(rows[x].unique()), [f"{each / 1e6:.2g}" for each in ticks])
        ax.yaxis.set_major_formatter(FuncFormatter(lambda rise, _: f"{rise:g}"))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.minorticks_off()
        ax.margins(x=0.15)
    axes[0].set_yticks([0.01, 0.02, 0.05, 0.1, 0.2])
    figure.suptitle("Longer training makes a model fragile", fontsize="medium")
    axes[0].set_ylabel("rise, nats a token")
    return figure


# Pretrain a model, and measure how much loss it bears, in inference and fine-tuned: the notebook 43_sizes.
#
# Models compare only if the bytes that are lost together are the same share of a token. So a packet carries a third of
# a token's activations at every size. Shapes: N texts, B texts of a batch, T tokens a text, S draws of losses.


class InferenceProbe:
    """A pretrained language model, some texts, and its cross-entropy on them without losses.

    The texts form batches of the training run's shape, so that messages have as many packets as in training.

    Args:
        model_name: the model that runs start from.
        batch_size: B.
        length: T.
        batches: number of batches, so N = B * batches.
        text: files by pattern, of the kind that the model was pretrained on. (On text that it predicts badly, losses
            hardly show.)
    """

    def __init__(self, model_name: str, *, batch_size: int, length: int, batches: int = 2, text: str) -> None:
        self.dense: Any = load_model(model_name).eval()
        documents, number = corpus(text, split="validation"), batch_size * batches
        blocks_NT = all_blocks(documents, load_tokenizer(model_name), block_size=length, at_most=number)
        self.batches_BT = blocks_NT.split(batch_size)
        self.lossless = self._score(self.dense)

    def rises(self, config: TrainConfig, draws: int) -> np.ndarray:
        """Return the rise of each draw of losses, (S,)."""
        network, ranks = config.network.build(), config.network.tensor_parallel_size
        model: Any = parallelize(self.dense, network, tensor_parallel_size=ranks, comm=config.comm())
        rises_S = []
        for draw in range(draws):
            with network.evaluation(draw):
                rises_S.append(self._score(model) - self.lossless)
        return np.array(rises_S)

    def _score(self, model: Any) -> float:
        """Return the mean cross-entropy of a token given the earlier ones, over texts and ranks."""
        return float(np.mean([token_losses(model, batch_BT).mean().item() for batch_BT in self.batches_BT]))


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
    batch = {"batch_size": fine.optimizer.batch_size, "length": fine.data.max_length}
    probe = InferenceProbe(config.output.output_dir, **batch, text=text_pattern(config))
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


# Claims.


@claim
def rises_grow_with_tokens(results: Results) -> Claim:
    """Require that the rise at 10 % grows with the tokens to a power above 1, in packets of both kinds.

    The power's interval must lie above 1. Each step to more tokens must multiply the rise by less than the last one.
    """
    numbers = {cost: _claimed_exponent(results, "tokens", cost, 0.1)["low"] for cost in ("rise", "rise, whole packets")}
    by_model: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(_small_packets(results), key=lambda row: row["tokens"]):
        by_model.setdefault(row["model_name"], []).append(row)
    rows = max(by_model.values(), key=len)
    growth = [later["rise"] / earlier["rise"] for earlier, later in pairwise(rows)]
    holds = min(numbers.values()) > 1 and growth == sorted(growth, reverse=True)
    return Claim(holds, numbers | {"first growth": growth[0], "last growth": growth[-1]})


@claim
def rises_shrink_with_size(results: Results) -> Claim:
    """Require that the exponent of the rise at 10 % is below 0 with its interval, in packets of both kinds.

    The largest of four models must pay least, and differ more from the next than that from the smallest. At 30 % the
    exponents must be closer to 0, with intervals below it. At 3 % both intervals must hold 0.
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
    *others, last = (row["rise"] for row in sorted(rows, key=lambda row: row["parameters"]))
    first, last_but_one = others[0], others[-1]
    holds = len(others) >= 3 and last < min(others) and max(numbers.values()) < 0 and below and uncertain
    holds &= last_but_one - last > first - last_but_one > 0
    return Claim(holds, numbers | {"smallest": first, "last but one": last_but_one, "largest": last})


@claim
def falls_shrink_with_size(results: Results) -> Claim:
    """Require that mean falls after fine-tuning shrink from size to size, to a power below 0 with its interval."""
    row = _claimed_exponent(results, "parameters", "fall", 0.3)
    rows = rows_of(results["sizes"]["falls"], tokens=results["sizes"]["tokens"])
    falls = [each["fall"] for each in sorted(rows, key=lambda each: each["parameters"])]
    shrink = falls == sorted(falls, reverse=True)
    return Claim(shrink and row["high"] < 0, {end: row[end] for end in ("value", "low", "high")})


def _small_packets(results: Results) -> list[dict[str, Any]]:
    """Return the rises at 10 % in packets of a third of a token."""
    return rows_of(results["sizes"]["rises"], whole_packets=False, loss_rate=0.1)


def _claimed_exponent(results: Results, against: str, cost: str, loss_rate: float) -> dict[str, Any]:
    row = row_of(results["sizes"]["exponents"], against=against, cost=cost, loss_rate=loss_rate)
    return {name: math.nan if value is None else value for name, value in row.items()}  # no claim holds of nan
