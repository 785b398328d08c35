"""Tabulate what losses cost a pretrained model in inference, from records of `lossytp.tolerance`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lossytp.network.repairs import repair_named
from lossytp.study.statistics import share_interval, t_interval

COLLAPSE_NATS = 3.0  # a block that rises by more has collapsed
USUAL = {"algorithm": "direct", "phase": "reduce", "losses": "single"}
NETWORK = ["algorithm", "phase", "loss_rate"]
FITTED = (0.03, 0.1)  # loss rates of the usual network through which the law of the median block goes


def rises(folder: Path) -> pd.DataFrame:
    """Return the rows of all tolerance records below a folder.

    Returns:
        Columns `model_name`, `ranks`, `losses` ("single", "bursts of 8" or another loss type), `algorithm`, `phase`,
        `repair`, `loss_rate`, `draws`, `blocks`, the `packets` of a draw, and the `lossless` cross-entropy. Then the
        `rise` in nats a token, with Student's 95 % interval over draws as `low` and `high`; the rise of the `median`
        block, the `smallest` and the `largest`; and `collapsed`, the share of blocks that rise by more than
        `COLLAPSE_NATS`, with its binomial interval as `collapsed_low` and `collapsed_high`.

    Raises:
        ValueError: if a record lacks what a tolerance record has.
    """
    rows: list[dict[str, Any]] = []
    for file in sorted(folder.rglob("tolerance.json")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            shared = {"model_name": record["config"]["model_name"], "ranks": record["tensor_parallel_size"]}
            shared |= {"losses": _losses(record["config"]), "lossless": record["lossless_cross_entropy"]}
            rows += [shared | _row(row) for row in record["rows"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a tolerance record ({error!r}): measure it again") from error
    return pd.DataFrame(rows)


def usual(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `rises` that lose single packets of the reduce phase in a direct exchange."""
    return table[(table[list(USUAL)] == pd.Series(USUAL)).all(axis=1)]


def repaired(table: pd.DataFrame) -> pd.DataFrame:
    """Return the usual network's rows at the loss rates at which repairs were tried."""
    ours = usual(table)
    return ours[ours["loss_rate"].isin(ours.loc[ours["repair"] != "zero", "loss_rate"])]


def predict_medians(errors: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """Predict the median block's rise over unrepaired networks, from the errors of their sums.

    A power law goes through the usual network's medians at the loss rates `FITTED`.

    Args:
        errors: one row per network: algorithm, phase, loss_rate, and `squared_error` and `stream_error` of
            `lossytp.tolerance.sum_errors`.
        measured: from `rises`, with these two rates.

    Returns:
        The errors, with `median_by_squared_error` and `median_by_stream_error`, in nats a token.
    """
    known = usual(measured).query("repair == 'zero'").set_index("loss_rate")["median"]
    ours = errors[(errors["algorithm"] == "direct") & (errors["phase"] == "reduce")].set_index("loss_rate")
    predicted = errors.copy()
    for name in ("squared_error", "stream_error"):
        predicted[f"median_by_{name}"] = _through_fitted(known, ours[name], errors[name])
    return predicted


def times_law(table: pd.DataFrame, errors: pd.DataFrame) -> pd.DataFrame:
    """Return the median block's rise over the law's prediction, for networks that lose single packets.

    Args:
        table: from `rises`.
        errors: one row per network and repair, as for `predict_medians`.

    Returns:
        The rows of both, with `times_law`. Repairs that remember earlier messages may have none, because
        `lossytp.tolerance.sum_errors` measures single sums.

    Raises:
        ValueError: if another row has no errors.
    """
    single = table[table["losses"] == USUAL["losses"]]
    key = [*NETWORK, "repair"]
    joined = single.merge(errors, on=key, how="left", validate="one_to_one", indicator="found")
    missing = joined["found"] == "left_only"
    excused = joined["repair"].map(lambda repair: repair_named(repair).remembers)
    unknown = joined[missing & ~excused]
    if len(unknown):
        algorithm, phase, rate, repair = unknown[key].iloc[0]
        raise ValueError(
            f"{algorithm}, {phase}, loss rate {rate:g}, {repair} was measured, but the errors of its sums were not: "
            "run notebooks/17_real_model.ipynb again"
        )
    joined = joined[~missing].drop(columns="found").reset_index(drop=True)
    bare = usual(joined).query("repair == 'zero'").set_index("loss_rate")
    law = _through_fitted(bare["median"], bare["stream_error"], joined["stream_error"])
    return joined.assign(times_law=joined["median"] / law)


def _through_fitted(medians: pd.Series, errors: pd.Series, x: pd.Series) -> pd.Series:
    """Return the power law at `x` that goes through the medians and errors, both by loss rate, at `FITTED`."""
    less, more = FITTED
    exponent = np.log(medians[more] / medians[less]) / np.log(errors[more] / errors[less])
    return medians[more] * (x / errors[more]) ** exponent


def against_predicted(table: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    """Return the unrepaired networks that were predicted, with what was measured.

    Args:
        table: from `rises`.
        predicted: from `predict_medians`.

    Returns:
        The predicted rows with `median`, `rise`, `low`, `high` and `collapsed`; `fitted` says whether the law goes
        through the row. For comparison, `median_by_loss_rate` comes from a power law of the loss rate alone.

    Raises:
        ValueError: if a predicted network was not measured.
    """
    bare = table[(table["repair"] == "zero") & (table["losses"] == USUAL["losses"])]
    wanted = [*NETWORK, "median", "rise", "low", "high", "collapsed"]
    joined = predicted.merge(bare[wanted], on=NETWORK, validate="one_to_one", how="left")
    if joined["median"].isna().any():
        algorithm, phase, rate = joined.loc[joined["median"].isna(), NETWORK].iloc[0]
        raise ValueError(
            f"{algorithm}, {phase}, loss rate {rate:g} was predicted, but not measured: run 17_real_model.ipynb"
        )
    fitted = joined["loss_rate"].isin(FITTED) & (joined["algorithm"] == "direct") & (joined["phase"] == "reduce")
    known = joined[fitted].set_index("loss_rate")["median"]
    by_rate = _through_fitted(known, pd.Series(FITTED, FITTED), joined["loss_rate"])
    return joined.assign(fitted=fitted, median_by_loss_rate=by_rate)


def _losses(config: dict[str, Any]) -> str:
    if config.get("mean_burst_packets") is not None:
        return f"bursts of {config['mean_burst_packets']:g}"
    return "single" if config.get("loss_type", "ber") == "ber" else str(config["loss_type"])


def _row(row: dict[str, Any]) -> dict[str, Any]:
    rises_SN = np.array(row["rises"])
    estimate = t_interval(rises_SN.mean(axis=1))
    collapsed = share_interval(int((rises_SN > COLLAPSE_NATS).sum()), rises_SN.size)
    return {
        **{name: row[name] for name in ("algorithm", "phase", "repair", "loss_rate")},
        "draws": len(rises_SN),
        "blocks": rises_SN.shape[1],
        "packets": row["packets_a_draw"],
        "rise": estimate.value,
        "median": float(np.median(rises_SN)),
        "low": estimate.low,
        "high": estimate.high,
        "smallest": float(rises_SN.min()),
        "largest": float(rises_SN.max()),
        "collapsed": collapsed.value,
        "collapsed_low": collapsed.low,
        "collapsed_high": collapsed.high,
    }


def strongest_packet(file: Path) -> dict[str, Any]:
    """Summarise what it costs to lose one packet of one sum: the strongest, and others.

    Args:
        file: a table of `lossytp.tolerance.strong_packets.by_norm`, for one layer and module.

    Returns:
        `layer`, `module`, `blocks`; `norm` of the strongest packet, the mean over blocks, and `usual_norm`, the largest
        of a packet below the strongest tenth; `rise` if the strongest is lost, its mean over blocks, and
        `least_rise`; and `usual_rise`, the largest if one of the usual packets is lost. Rises are in nats a token.
    """
    table = pd.read_csv(file)
    strongest, usual = table[table["bin"] == "strongest"], table[table["bin"] == "rest"]
    return {
        "layer": int(table["layer"].iloc[0]),
        "module": str(table["module"].iloc[0]),
        "blocks": int(table["block"].nunique()),
        "norm": float(strongest["norm"].mean()),
        "usual_norm": float(usual["norm"].max()),
        "rise": float(strongest["rise"].mean()),
        "least_rise": float(strongest["rise"].min()),
        "usual_rise": float(usual["rise"].max()),
    }
