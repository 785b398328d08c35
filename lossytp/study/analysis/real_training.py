"""Say what training under loss changes in a real model, from the table of `lossytp.tolerance.after_training`."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from lossytp.network.repairs import repair_named
from lossytp.study.comparisons import paired_p, with_holm
from lossytp.study.records import LOSSLESS, json_rows, loss_rate_of
from lossytp.study.statistics import t_interval

NOTHING, BEST, FEW = "zero", "protect(0.1) + hadamard(64)", "protect(0.01) + hadamard(64)"
UNTIL_IT_ARRIVES = "retransmit(100)"
ADVISED = "protect(0.1) + retransmit(1)"
RETRANSMITTING = ("retransmit(1)", ADVISED, UNTIL_IT_ARRIVES)
POINTS = 100
CONTRASTS = {  # both models and repairs of a difference in accuracy: trained over, evaluated with
    "training under loss": ((NOTHING, NOTHING), (LOSSLESS, NOTHING)),
    "a tenth": ((LOSSLESS, BEST), (LOSSLESS, NOTHING)),
    "a hundredth": ((LOSSLESS, FEW), (LOSSLESS, NOTHING)),
    "a tenth, not a hundredth": ((LOSSLESS, BEST), (LOSSLESS, FEW)),
    "protected training, a tenth": ((BEST, BEST), (LOSSLESS, BEST)),
    "protected training, a hundredth": ((BEST, FEW), (LOSSLESS, FEW)),
}


def outcomes(table: pd.DataFrame) -> pd.DataFrame:
    """Return the fall of each model with each repair, against the model that was trained and run without losses.

    Args:
        table: one row per model and repair: `task`, `seed`, `trained_at`, `trained_with`, `evaluated_with`, `accuracy`,
            `clean` and `strongest`.

    Returns:
        Columns `task`, `trained_over` ("no loss", or the repair of a training under loss), `evaluated_with`, `seeds`,
        `fall` as a share with its 95 % interval, Student's over seeds, as `low` and `high`, the same without losses as
        `clean_fall`, `clean_low` and `clean_high`, `strongest`, the mean ratio of the strongest packet to the median
        one, and `weakest`, the smallest over seeds.
    """
    runs = _named(table)
    key = ["task", "seed"]
    lossless = runs[runs["trained_over"] == LOSSLESS].drop_duplicates(key).set_index(key)["clean"].rename("lossless")
    rows: list[dict[str, Any]] = []
    names = ["task", "trained_over", "evaluated_with"]
    for values, ours in runs.join(lossless, on=key, how="inner").groupby(names, sort=False):
        fall, clean = (t_interval((ours["lossless"] - ours[name]).to_numpy()) for name in ("accuracy", "clean"))
        measured = {"seeds": len(ours), "fall": fall.value, "low": fall.low, "high": fall.high}
        measured |= {"clean_fall": clean.value, "clean_low": clean.low, "clean_high": clean.high}
        measured |= {"strongest": float(ours["strongest"].mean()), "weakest": float(ours["strongest"].min())}
        rows.append(dict(zip(names, values, strict=True)) | measured)
    return pd.DataFrame(rows)


def contrasts(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the gains in accuracy of `CONTRASTS` in each task, paired by seed, with their 95 % intervals.

    Args:
        table: as for `outcomes`.

    Returns:
        A mapping for each: `task`, `contrast`, `seeds`, the gain's `value`, `low` and `high`, as a share, `p` of
        Student's paired test and `p_holm`, corrected over all contrasts of all tasks.
    """
    found: list[dict[str, Any]] = []
    for task, ours in _named(table).groupby("task", sort=False):
        runs = ours.set_index(["trained_over", "evaluated_with", "seed"])["accuracy"].sort_index()
        for name, (better, worse) in CONTRASTS.items():
            gains = (runs.loc[better] - runs.loc[worse]).dropna()
            row = {"task": task, "contrast": name, "seeds": len(gains), "p": paired_p(gains.to_numpy())}
            found.append(row | t_interval(gains.to_numpy()).as_json())
    return json_rows(with_holm(pd.DataFrame(found)))


def gains_by_rate(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Return how much accuracy protection keeps at each loss rate, in training and evaluation, paired by seed.

    Args:
        runs: of one task, from `records.tidy`. Experiments that share runs may be joined.

    Returns:
        A mapping for each loss rate with both repairs: `loss_rate`, `seeds`, and the gain of `BEST` over `NOTHING` as a
        share, with its 95 % interval.
    """
    found = []
    for rate, ours in runs.drop_duplicates("run").query("loss_rate > 0").groupby("loss_rate"):
        by_repair = ours.pivot(index="seed", columns="repair", values="accuracy_lossy")
        if not {BEST, NOTHING} <= set(by_repair):
            continue
        gains = (by_repair[BEST] - by_repair[NOTHING]).dropna()
        found.append({"loss_rate": float(str(rate)), "seeds": len(gains), **t_interval(gains.to_numpy()).as_json()})
    return found


def first_fall(runs: pd.DataFrame, *, seeds: int) -> list[float]:
    """Return the fall of `ADVISED` over the first seeds, in points, and its 95 % interval; empty without such runs.

    Args:
        runs: from `records.tidy`, with the arm without losses.
        seeds: their number. Later seeds were added once these were seen.
    """
    if runs.empty or ADVISED not in set(runs["arm"]):
        return []
    accuracy = runs.pivot(index="seed", columns="arm", values="accuracy_lossy").sort_index().head(seeds)
    return [POINTS * each for each in t_interval((accuracy[LOSSLESS] - accuracy[ADVISED]).to_numpy())]


def expected_round_trips(record: Mapping[str, Any], repair: str) -> float:
    """Return for how many round trips a message of a training run would wait with a repair, on average.

    A message travels over all links at once, and waits for the last packet of any. Protected packets are counted over
    all links together, where each link would round their number up.
    """
    traffic = record["network"]["training"]
    packets = (traffic["packets"] - traffic["extra"]) / traffic["messages"]["called"]
    return repair_named(repair).round_trips(loss_rate_of(record), round(packets))


def _named(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(trained_over=table["trained_with"].where(table["trained_at"] > 0, LOSSLESS))
