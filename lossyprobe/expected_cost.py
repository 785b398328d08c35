"""Estimate from the study's runs what a network's losses would cost, and mark extrapolations.

The runs are those of one training (see `comparable_runs`); they differ in algorithm, phase, repair and losses alone. A
cost is the drop in accuracy against the lossless run of the same seed. Between tried loss rates it is interpolated, as
are the ends of its interval; below the smallest rate it falls to 0 at a rate of 0.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from scipy.optimize import isotonic_regression

from lossytp.study.statistics import ONE_POINT, Estimate, student_quantile, t_interval

TABLE = "experiment_summary.csv"
RESULTS = Path(__file__).parents[1] / "results" / "paper"
STANDARD = "01_tolerance"  # the experiment whose settings count
LEFT_OUT = "12_predictions"  # has seeds of its own, too few for intervals
VARIED = ("loss_type", "loss_rate", "mean_burst_packets", "ge_config", "algorithm", "repair", "reliable_gather", "seed")
IRRELEVANT = ("arm", "run", "experiment", "eval_steps", "save_model", "link_gbits", "round_trip_us", "output_dir")
NETWORK = ["task", "algorithm", "phase", "repair"]
USED = ["task", "algorithm", "repair", "loss_rate", "seed", "accuracy_lossy"]
ALIKE = 1.5  # ratio of mean bursts that count as alike
FEWEST_RATES = 3  # above 0, for a loss budget with an interval
GRID = 4001  # number of loss rates at which a budget's interval may end
ROUNDING = 1e-12


def comparable_runs(folder: Path) -> pd.DataFrame:
    """Return the study's runs with the settings of `STANDARD`, whatever their network.

    Args:
        folder: the study's results.

    Returns:
        One row per run: the columns `USED` of `experiment_summary.csv`, `phase` ("reduce" or "both") and `burst`, the
        mean burst in packets, 1.0 for losses that are independent.

    Raises:
        ValueError: if the folder has no such table, or the table has no such runs.
    """
    try:
        table = pd.read_csv(folder / TABLE)
        text = pd.read_csv(folder / TABLE, dtype=str, keep_default_na=False)
    except OSError as error:
        raise ValueError(f"{folder / TABLE} cannot be read ({error.strerror}): give a study's results") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{folder / TABLE} is no table ({error}): give a study's results") from error
    lacks = {*USED, *VARIED, "status", "processes", "experiment"} - set(table)
    if lacks or STANDARD not in set(table["experiment"]):
        raise ValueError(f"{folder / TABLE} has no runs of {STANDARD}: give a study's results")
    settings = [name for name in table.columns[: table.columns.get_loc("status")] if name not in (*VARIED, *IRRELEVANT)]
    settings.append("processes")
    training = text[settings].agg("|".join, axis=1)
    standard = training.isin(training[table["experiment"] == STANDARD])
    table = table[standard & table["loss_type"].isin(("ber", "g-e")) & (table["experiment"] != LEFT_OUT)]
    table = table.drop_duplicates([*settings, *VARIED])
    phase = np.where(table["reliable_gather"], "reduce", "both")
    burst = np.where(table["loss_type"] == "ber", 1.0, table["mean_burst_packets"])
    return table[USED].assign(phase=phase, burst=burst)


def expected_costs(runs: pd.DataFrame, *, loss_rate: float, mean_burst_packets: float) -> pd.DataFrame:
    """Return what losses of this rate and mean burst would cost on each network that the study tried.

    Args:
        runs: from `comparable_runs`.
        loss_rate: of every link.
        mean_burst_packets: the mean run of consecutive losses.

    Returns:
        One row for each task, `algorithm`, `phase` and `repair`: the `cost` in accuracy, as a share, with `low` and
        `high`; the `budget`, the loss rate that costs one point, with `budget_low` and `budget_high` where the study
        measured them; `extrapolated`, and the `basis` in words. The runs used are those with the closest mean burst;
        of equally close ones, those with most rates.
    """
    lossless = runs[runs["loss_rate"] == 0].groupby(["task", "seed"])["accuracy_lossy"].first().rename("lossless")
    lossy = runs[runs["loss_rate"] > 0].join(lossless, on=["task", "seed"])
    lossy = lossy.assign(drop=lossy["lossless"] - lossy["accuracy_lossy"]).dropna(subset=["drop"])
    own = max(mean_burst_packets, _independent(loss_rate))
    rows = []
    for network, of_network in lossy.groupby(NETWORK, sort=False):
        bursts = of_network.groupby("burst")["loss_rate"].nunique()
        closest = min(bursts.index, key=lambda burst: (_times(burst, loss_rate, own), -bursts[burst]))
        curve = of_network[of_network["burst"] == closest]
        row = dict(zip(NETWORK, network, strict=True))
        rows.append(row | _cost(curve, loss_rate) | _budget(curve, lossless))
        rows[-1]["basis"], rows[-1]["extrapolated"] = _basis(curve, loss_rate, closest, own)
    return pd.DataFrame(rows).sort_values(NETWORK, kind="stable").reset_index(drop=True)


def _independent(loss_rate: float) -> float:
    """Return the mean burst of independent losses, in packets."""
    return 1 / max(1 - loss_rate, ROUNDING)


def _times(burst: float, loss_rate: float, own: float) -> float:
    """Return the ratio, at least 1, of a mean burst of the study, 1.0 for independent losses, and our own."""
    theirs = _independent(loss_rate) if burst == 1 else burst
    return max(theirs / own, own / theirs)


def _points(curve: pd.DataFrame) -> tuple[np.ndarray, list[Estimate]]:
    """Return the tried rates and the drop at each."""
    by_rate = [(float(str(rate)), t_interval(runs["drop"].to_numpy())) for rate, runs in curve.groupby("loss_rate")]
    return np.array([rate for rate, _ in by_rate]), [drop for _, drop in by_rate]


def _cost(curve: pd.DataFrame, loss_rate: float) -> dict[str, float]:
    rates, drops = _points(curve)
    scale = max(1.0, loss_rate / rates[-1])  # beyond the largest rate, costs grow in proportion
    found = {}
    for name, part in zip(("cost", "low", "high"), zip(*drops, strict=True), strict=True):
        found[name] = scale * float(np.interp(loss_rate, np.append(0.0, rates), np.append(0.0, part)))
    return found


def _budget(curve: pd.DataFrame, lossless: pd.Series) -> dict[str, float]:
    """Return the loss rate that costs one point.

    It is in proportion to the largest rate's cost if few rates were tried, or no seed has all of them.
    """
    rates, drops = _points(curve)
    names = ("budget", "budget_low", "budget_high")
    accuracy = curve.pivot_table(index="seed", columns="loss_rate", values="accuracy_lossy").dropna()
    if len(rates) < FEWEST_RATES or accuracy.empty:
        cost = drops[-1].value
        alone = rates[-1] * ONE_POINT / cost if cost > rates[-1] * ONE_POINT else math.inf
        return dict(zip(names, (alone, math.nan, math.nan), strict=True))
    first = lossless.loc[curve["task"].iloc[0]].loc[accuracy.index]
    matrix = np.column_stack([first.to_numpy(), accuracy.to_numpy()])
    return dict(zip(names, loss_budget(np.append(0.0, rates), matrix), strict=True))


def _basis(curve: pd.DataFrame, loss_rate: float, burst: float, own: float) -> tuple[str, bool]:
    """Return in words where a cost comes from, and whether it is an extrapolation."""
    if loss_rate == 0:
        return "no losses", False
    rates = np.sort(curve["loss_rate"].unique())
    tried = rates[np.isclose(rates, loss_rate)]  # a trace's rate is a quotient
    after = int(rates.searchsorted(loss_rate))
    doubts = []
    if len(tried):
        where = f"measured at {tried[0]:.3g}"
    elif after == len(rates):
        where = f"in proportion to {rates[-1]:.3g}"
        doubts.append("beyond every tried rate")
    elif after:
        where = f"between {rates[after - 1]:.3g} and {rates[after]:.3g}"
    else:
        where = f"in proportion to {rates[0]:.3g}"
        doubts.append("below every tried rate")
    if _times(burst, loss_rate, own) > ALIKE:
        stand_in = "single losses" if burst == 1 else f"bursts of {burst:g}"
        doubts.append(f"{stand_in} stand for bursts of {own:.1f}")
    return "; ".join([where, *doubts]), bool(doubts)


def side_by_side(costs: pd.DataFrame) -> pd.DataFrame:
    """Return a table to read: one row per network, two columns per task. A question mark is an extrapolation.

    Args:
        costs: from `expected_costs`.
    """
    rows: dict[tuple, dict[str, str]] = {}
    for row in costs.to_dict("records"):
        mark = "?" if row["extrapolated"] else ""
        points = f"{100 * row['cost']:z.1f} ({100 * row['low']:z.1f} to {100 * row['high']:z.1f}){mark}"
        cells = rows.setdefault(tuple(row[name] for name in NETWORK[1:]), {})
        cells |= {f"points lost in {row['task']}": points, f"one point at, {row['task']}": _budget_in_words(row)}
    networks = [dict(zip(NETWORK[1:], network, strict=True)) for network in rows]
    return pd.DataFrame([network | cells for network, cells in zip(networks, rows.values(), strict=True)])


def _budget_in_words(row: Mapping[Any, Any]) -> str:
    values = [row[name] for name in ("budget", "budget_low", "budget_high")]
    texts = ["never" if value == math.inf else f"{100 * value:.2g} %" for value in values]
    return f"{texts[0]}?" if math.isnan(values[1]) else f"{texts[0]} ({texts[1]} to {texts[2]})"


def rate_of_drop(rates: np.ndarray, drops: np.ndarray) -> float:
    """Return the smallest loss rate at which accuracy drops by one point, or `math.inf` if it never does.

    The drops are fitted by a curve that never falls: isotonic regression (Barlow et al., 1972), at least 0, linear
    between rates.

    Args:
        rates: (R,) in ascending order, the first without losses.
        drops: (R,) drops in accuracy, as shares; `drops[0]` is 0.
    """
    fit = np.concatenate(([0.0], np.maximum(isotonic_regression(drops[1:]).x, 0.0)))
    reached = np.flatnonzero(fit >= ONE_POINT - ROUNDING)
    if not len(reached):
        return math.inf
    after = int(reached[0])
    before = after - 1
    share = (ONE_POINT - fit[before]) / (fit[after] - fit[before])
    return float(rates[before] + share * (rates[after] - rates[before]))


def loss_budget(rates: np.ndarray, accuracy_SR: np.ndarray) -> Estimate:
    """Return the loss rate at which accuracy drops by one point, and its 95 % interval.

    The interval inverts Student's paired test (Fieller 1954). It begins at the first rate whose drop may reach one
    point, and ends at the last rate whose drop may stay below it. At the true budget both hold in 95 % of studies, for
    any number of seeds, if drops are linear between the tried rates. If they are not, more rates near the budget help,
    and more seeds do not. (A bootstrap over seeds would be biased: on a flat curve, noise alone makes its fits drop.)

    Args:
        rates: (R,) in ascending order, the first without losses.
        accuracy_SR: (S seeds, R), trained and evaluated at each rate. Each seed's drops start at its lossless accuracy.

    Returns:
        The budget and its interval. `math.inf` means beyond the largest rate: as `value` if the fit never drops by one
        point, as `high` if a smaller drop is possible at the largest rate, as `low` if a smaller drop is certain there.
    """
    drops_SR = np.asarray(accuracy_SR, dtype=float)
    drops_SR = drops_SR[:, :1] - drops_SR
    value = rate_of_drop(rates, drops_SR.mean(0))
    if len(drops_SR) < 2:
        return Estimate(value, 0.0, math.inf)
    fine = np.unique(np.concatenate([rates, np.linspace(rates[0], rates[-1], GRID)]))
    fine_SF = np.array([np.interp(fine, rates, drops) for drops in drops_SR])
    mean = fine_SF.mean(0)
    half = student_quantile(len(fine_SF)) * stats.sem(fine_SF, axis=0)
    may_reach = np.flatnonzero(mean + half >= ONE_POINT - ROUNDING)
    may_miss = np.flatnonzero(mean - half <= ONE_POINT + ROUNDING)
    low = float(fine[may_reach[0]]) if len(may_reach) else math.inf
    high = math.inf if may_miss[-1] == len(fine) - 1 else float(fine[may_miss[-1]])
    return Estimate(value, low, high)
