"""What do larger packets cost, and losses of whole tokens?"""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lossytp.study.statistics import t_interval
from lossytp.study.style import COLUMN, estimates
from lossytp.training.config import TrainConfig
from lossytp.training.shapes import shape_of
from paper.comparisons import json_rows, with_falls
from paper.study import (
    FALL,
    HEADLINE,
    POINTS,
    Claim,
    Results,
    Study,
    claim,
    label_ends,
    row_of,
    rows_of,
    shown,
    task_name,
    tasks,
)

ELEMENT_BYTES = 4  # of float32 on the wire


def lost_together(compared: pd.DataFrame, configs: Sequence[TrainConfig]) -> pd.DataFrame:
    """Return the arms that lose the same share of the traffic in pieces of different sizes.

    A piece is an element, a packet, the packets of a mean burst, or a rank's whole chunk of a message.

    Args:
        compared: one row per arm, from `comparisons.drops_and_gains`.
        configs: a configuration of each row.

    Returns:
        Columns `task`, `arm`, `loss_rate`, `bytes` lost together, `fall` in accuracy, as a share, with `low` and
        `high`. Arms that lose no pieces, such as Gaussian noise, and bursts of whole messages are left out.
    """
    together = pd.Series([_bytes_together(config) for config in configs], index=compared.index, dtype=float)
    table = with_falls(compared).assign(bytes=together)
    table = table.dropna(subset=["fall", "bytes"]).sort_values(["task", "bytes"], kind="stable")
    return table.drop_duplicates(["task", "bytes", "loss_rate"])[
        ["task", "arm", "loss_rate", "bytes", "fall", "low", "high"]
    ].reset_index(drop=True)


def _bytes_together(config: TrainConfig) -> float | None:
    """Return the mean size of what one loss event takes on one link; None if the arm is not of this kind."""
    shape = shape_of(config.model_name)
    if shape is None or config.network.control == "noise" or config.network.loss_type not in ("ber", "g-e"):
        return None
    if config.network.control == "elements":
        return ELEMENT_BYTES
    chunk = (
        config.optimizer.batch_size
        * config.data.max_length
        * shape.width
        * ELEMENT_BYTES
        / config.network.tensor_parallel_size
    )
    if config.network.mtu_bytes < chunk:
        return config.network.mtu_bytes * (config.network.mean_burst_packets or 1.0)
    return None if config.network.loss_type == "g-e" else chunk


def packet_size_effect(runs: pd.DataFrame) -> pd.DataFrame:
    """Return how much more accuracy larger packets cost than the smallest, paired by seed.

    Args:
        runs: one row per run with losses, with `task`, `loss_rate`, `mtu_bytes`, `seed` and `accuracy_lossy`; at one
            loss rate per task. Runs that several experiments have count once.

    Returns:
        Columns `task`, `loss_rate`, `mtu_bytes`, `smallest_bytes`, `seeds`, and the `cost` as a share with Student's
        interval as `low` and `high`, of all but the smallest packets.
    """
    rows = []
    for (task, rate), ours in runs.groupby(["task", "loss_rate"], sort=False):
        by_seed = ours.drop_duplicates(["mtu_bytes", "seed"]).pivot_table(
            index="seed", columns="mtu_bytes", values="accuracy_lossy"
        )
        smallest, *larger = by_seed.columns
        for size in larger:
            pairs = (by_seed[smallest] - by_seed[size]).dropna().to_numpy()
            estimate = t_interval(pairs)
            row = {"task": task, "loss_rate": rate, "mtu_bytes": size, "smallest_bytes": smallest, "seeds": len(pairs)}
            rows.append(row | {"cost": estimate.value, "low": estimate.low, "high": estimate.high})
    return pd.DataFrame(rows)


def cost_against_bytes(table: pd.DataFrame) -> Figure:
    """Draw the fall at one loss rate against the bytes that are lost together, one line per task.

    Args:
        table: from `lost_together`.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 2.0), layout="constrained")
    ends = []
    for number, (task, rows) in enumerate(table.groupby("task", sort=False)):
        estimates(ax, rows["bytes"], POINTS * rows[FALL], number, linestyle="-")
        last = rows.iloc[-1]
        name = f"{task_name(task)}\n{POINTS * last['loss_rate']:g} % loss"
        ends.append((POINTS * last["fall"], name, f"C{number}"))
    ax.set_xscale("log")
    ax.set_ylim(bottom=0)
    label_ends(ax, ends)
    ax.set(xlabel="bytes lost together (element, packet, burst, message)", ylabel="fall in accuracy, points")
    return figure


def together(study: Study) -> dict[str, Any]:
    """Return what it costs to lose more bytes together, at equal loss rate."""
    names = [name for name in ("02_structure", "10_carry_over") if name in study.comparisons]
    if not names:
        return {}
    configs = [config for name in names for config in study.configs(name)]
    usual = study.records[HEADLINE][0]["config"]["model_name"]
    rows = pd.concat([study.comparisons[name] for name in names], ignore_index=True)
    kept = [
        number
        for number, config in enumerate(configs)
        if config.model_name == usual and config.network.wire_dtype is None
    ]
    table = lost_together(rows.iloc[kept].reset_index(drop=True), [configs[number] for number in kept])
    study.draw(cost_against_bytes(table), "bytes_together")
    found = {"together": json_rows(table)}
    if {"10_carry_over", "10_packets_again"} <= study.comparisons.keys():
        found["packet_size"] = json_rows(packet_size_effect(_runs_by_packet_size(study, usual)))
    return found


def _runs_by_packet_size(study: Study, model_name: str) -> pd.DataFrame:
    """Return the unrepaired runs that differ in packet size alone, on the seeds that did not suggest the effect."""
    again = study.tables["10_packets_again"]
    every = pd.concat([again, study.tables[HEADLINE]], ignore_index=True)
    every = every[every["seed"].isin(again["seed"])]
    rates = every["task"].map(_packet_rates(study))
    alike = {"model_name": model_name, "repair": "zero", "algorithm": "direct", "loss_type": "ber"}
    usual = (every[list(alike)] == pd.Series(alike)).all(axis=1) & every["wire_dtype"].isna() & every["reliable_gather"]
    return every[usual & (every["loss_rate"] == rates)]


def _packet_rates(study: Study) -> "pd.Series[float]":
    """Return the loss rate, by task, at which packets of several sizes were compared."""
    rates: pd.Series[float] = study.tables["10_carry_over"].query("loss_rate > 0").groupby("task")["loss_rate"].first()
    return rates


@claim
def bytes_lost_together_cost_more(results: Results) -> Claim:
    """Require that messages cost more than elements, with intervals apart.

    In docstrings no fall may shrink as the bytes grow.
    """
    numbers: dict[str, float] = {}
    holds = True
    for task in tasks(results):
        rows = sorted((row for row in results["together"] if row["task"] == task), key=lambda row: row["bytes"])
        holds &= rows[-1]["low"] > rows[0]["high"]
        falls = [row["fall"] for row in rows]
        holds &= task != "docstrings" or falls == sorted(falls)
        numbers |= {
            f"{task}, most of the least": POINTS * rows[0]["high"],
            f"{task}, least of the most": POINTS * rows[-1]["low"],
        }
    return Claim(holds, numbers)


@claim
def packet_size_matters(results: Results) -> Claim:
    """Require in each task that packets of 1500 bytes cost more than the smallest; the largest are not shown to."""
    lows = {row["task"]: POINTS * row["low"] for row in rows_of(results["packet_size"], mtu_bytes=1500)}
    planned = rows_of(results["comparisons"]["10_packets_again"], arm="packets of 9000 bytes")
    holds = len(lows) == len(planned) == len(tasks(results)) and not any(shown(row["gain_p_holm"]) for row in planned)
    return Claim(holds and min(lows.values()) > 0, lows)


@claim
def shared_losses_cost_more(results: Results) -> Claim:
    """Require that losses that strike all links at once cost more than each link's own, in each task."""
    rows = [row_of(results["comparisons"]["02_shared"], task=task, arm="losses all shared") for task in tasks(results)]
    return Claim(all(row["gain_high"] < 0 for row in rows), {row["task"]: POINTS * row["gain_high"] for row in rows})
