"""Make the paper's contents about what predicts the cost: the law, predictions, bytes lost together, packet sizes.

Each public function is a section, as in `lossytp.study.paper`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from lossytp.study.analysis.law import (
    FEWEST_ARMS,
    PowerLaw,
    explained_elsewhere,
    law_arms,
    law_of,
    predict_other_packets,
    with_standard_errors,
)
from lossytp.study.analysis.predictions import score, shared_errors, with_measured
from lossytp.study.analysis.together import lost_together, packet_size_effect
from lossytp.study.figures.main import collapse, cost_against_bytes
from lossytp.study.figures.predictions import falls_of_small_packets, predicted_and_measured
from lossytp.study.finished_runs import HEADLINE, Study
from lossytp.study.records import LOSSLESS, json_rows
from lossytp.study.statistics import finite
from lossytp.training.config import TrainConfig

SMALL_PACKETS = "01_tolerance_of_small_packets"


def law(study: Study) -> dict[str, Any]:
    """Return the one law: the fall against the expected squared error of a sum."""
    configs_of_headline = [TrainConfig.from_dict(record["config"]) for record in study.records[HEADLINE]]
    base = {config.dataset: config for config in configs_of_headline if config.process_rate == 0}
    compared = [(table, study.configs(name)) for name, table in study.comparisons.items()]
    configs = [config for _, each in compared for config in each]
    coherence = {task: each["coherence"] for task, each in study.baselines.items()}
    everything = pd.concat([table for table, _ in compared], ignore_index=True)
    arms_like = partial(law_arms, everything, configs, coherence=coherence)
    arms = with_standard_errors(arms_like(base))
    fitting = (~arms["both_phases"]).groupby(arms["task"]).sum()
    if fitting.empty or fitting.min() < FEWEST_ARMS:  # the smallest of no numbers is NaN
        return {}
    fitted = {str(task): law_of(ours) for task, ours in arms[~arms["both_phases"]].groupby("task", sort=False)}
    elsewhere: dict[str, dict[str, float | None]] = {}
    for task, ours in arms[~arms["both_phases"]].groupby("task", sort=False):
        found = {name: explained_elsewhere(ours, name) for name in ("squared_error", "missing_share")}
        cheaper = ours[ours["squared_error"] < ours["squared_error"].max()]
        elsewhere[str(task)] = found | {"without_costliest": explained_elsewhere(cheaper, "squared_error")}
    study.draw(collapse(arms, fitted), "collapse")
    both = arms[arms["both_phases"]]
    costlier = {}  # the fall over what the law expects, where that is more than two standard errors of the fall
    for task, ours in both.groupby("task", sort=False):
        expected = fitted[str(task)].fall(ours["squared_error"].to_numpy())
        costlier[task] = (ours["fall"] / expected)[expected > 2 * ours["standard_error"]].tolist()
    return {
        "law": {task: finite(each._asdict()) for task, each in fitted.items()},
        "law_elsewhere": elsewhere,
        "law_both_phases": costlier,
        "law_arms": json_rows(arms),
        **_small_packets(study, arms_like, base, fitted),
    }


def _small_packets(
    study: Study,
    arms_like: Callable[[dict[str, TrainConfig]], pd.DataFrame],
    base: dict[str, TrainConfig],
    fitted: dict[str, PowerLaw],
) -> dict[str, Any]:
    """Return the falls with small packets, beside the law's predictions."""
    if SMALL_PACKETS not in study.comparisons:
        return {}
    config = next(each for each in study.configs(SMALL_PACKETS) if each.process_rate)
    task = config.dataset
    arms = arms_like({task: replace(base[task], mtu_bytes=config.mtu_bytes)})
    predicted = predict_other_packets(fitted[task], arms, _packet_rates(study)[task])
    study.draw(falls_of_small_packets(predicted, fitted[task]), "small_packets")
    return {"small_packets": json_rows(predicted)}


def predictions(study: Study) -> dict[str, Any]:
    """Return how far the predictions of new arms, committed before these ran, agree with what was measured."""
    file = study.results / "predictions" / "predictions.csv"
    table, _ = study.complete("12_predictions", 1)
    if table.empty or not file.is_file():
        return {}
    measured = with_measured(pd.read_csv(file), table)
    study.draw(predicted_and_measured(measured), "predictions")
    before = study.tables[HEADLINE]
    lossless = [each[each["arm"] == LOSSLESS] for each in (table, before[before["task"].isin(table["task"])])]
    new, old = (runs["accuracy_lossy"].mean() for runs in lossless)
    return {
        "predictions": json_rows(measured.drop(columns="freedom")),
        "prediction_scores": json_rows(score(measured)),
        "shared_prediction_errors": shared_errors(measured),
        "lossless_of_new_seeds": float(new - old),  # in accuracy, above those of the headline's seeds
    }


def together(study: Study) -> dict[str, Any]:
    """Return what it costs to lose more bytes together, at equal loss rate."""
    names = [name for name in ("02_structure", "10_carry_over") if name in study.comparisons]
    if not names:
        return {}
    configs = [config for name in names for config in study.configs(name)]
    usual = study.records[HEADLINE][0]["config"]["model_name"]
    rows = pd.concat([study.comparisons[name] for name in names], ignore_index=True)
    kept = [number for number, config in enumerate(configs) if config.model_name == usual and config.wire_dtype is None]
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
