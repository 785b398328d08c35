"""Tabulate what losses cost a pretrained model in inference, from records of `lossytp.tolerance`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lossytp.study.statistics import t_interval

COLLAPSE_NATS = 3.0  # a block that rises by more has collapsed


def rises(folder: Path) -> pd.DataFrame:
    """Return the rows of all tolerance records below a folder.

    Returns:
        Columns `model_name`, `ranks`, `algorithm`, `phase`, `repair`, `loss_rate`, `draws`, `blocks`, `lossless`
        cross-entropy, `rise` in nats a token with Student's 95 % interval over draws as `low` and `high`, the
        `median` block's rise, and
        `collapsed`, the share of blocks that rise by more than `COLLAPSE_NATS`.

    Raises:
        ValueError: if a record lacks what a tolerance record has.
    """
    rows: list[dict[str, Any]] = []
    for file in sorted(folder.rglob("tolerance.json")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            shared = {"model_name": record["config"]["model_name"], "ranks": record["tensor_parallel_size"]}
            shared["lossless"] = record["lossless_cross_entropy"]
            rows += [shared | _row(row) for row in record["rows"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a tolerance record ({error!r}): measure it again") from error
    return pd.DataFrame(rows)


def _row(row: dict[str, Any]) -> dict[str, Any]:
    rises_SN = np.array(row["rises"])
    estimate = t_interval(rises_SN.mean(axis=1))
    return {
        **{name: row[name] for name in ("algorithm", "phase", "repair", "loss_rate")},
        "draws": len(rises_SN),
        "blocks": rises_SN.shape[1],
        "rise": estimate.value,
        "median": float(np.median(rises_SN)),
        "low": estimate.low,
        "high": estimate.high,
        "collapsed": float((rises_SN > COLLAPSE_NATS).mean()),
    }


def strongest_packet(file: Path) -> dict[str, Any]:
    """Summarise what it costs to lose one packet of one sum: the strongest, and others.

    Args:
        file: a table of `lossytp.tolerance.strong_packets.by_norm`, for one layer and module.

    Returns:
        `layer`, `module`, `blocks`; `norm` of the strongest packet, the mean over blocks, and `usual_norm`, the median
        of the packets below the strongest tenth; `rise` if the strongest is lost, its mean over blocks, and
        `least_rise`; and `usual_rise`, the largest if one of the usual packets is lost. Rises are in nats a token.
    """
    table = pd.read_csv(file)
    strongest, usual = table[table["bin"] == "strongest"], table[table["bin"] == "rest"]
    return {
        "layer": int(table["layer"].iloc[0]),
        "module": str(table["module"].iloc[0]),
        "blocks": int(table["block"].nunique()),
        "norm": float(strongest["norm"].mean()),
        "usual_norm": float(usual["norm"].median()),
        "rise": float(strongest["rise"].mean()),
        "least_rise": float(strongest["rise"].min()),
        "usual_rise": float(usual["rise"].max()),
    }
