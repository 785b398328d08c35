"""Intervals for few seeds, and the loss budget.

Shapes: S seeds, R loss rates, in ascending order.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.optimize import isotonic_regression

CONFIDENCE = 0.95
GRID = 4001  # rates at which an interval's ends are looked for


class Estimate(NamedTuple):
    """A value and the ends of its confidence interval; `math.inf` where it lies beyond what was tried."""

    value: float
    low: float
    high: float


def t_interval(values: np.ndarray, confidence: float = CONFIDENCE) -> Estimate:
    """Mean of (S,) independent values and Student's interval; infinite for a single value.

    A percentile bootstrap of five values covers 84 % where it claims 95 %.
    """
    values = np.asarray(values, dtype=float)
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean, -math.inf, math.inf)
    half = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1) * stats.sem(values))
    return Estimate(mean, mean - half, mean + half)


def holm(p_values: np.ndarray) -> np.ndarray:
    """(C,) p-values of the comparisons of one question, adjusted so that all together err in 5 % of studies.

    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 1979.
    """
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(factors * np.asarray(p_values, dtype=float)[order]))
    return adjusted


def rank_correlation(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    """Spearman's rank correlation of (C,) and (C,) values; 0 where one of them does not vary."""
    first, second = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    return 0.0 if np.ptp(first) == 0 or np.ptp(second) == 0 else float(stats.spearmanr(first, second).statistic)


def budget_of_falls(rates: np.ndarray, falls: np.ndarray, drop: float) -> float:
    """Smallest loss rate at which a rising fit through (R,) falls in accuracy reaches `drop`, `falls[0]` being 0.

    The fit is isotonic regression (Barlow et al., 1972), not below 0, linear between rates; `math.inf` where it never
    rises so far.
    """
    fit = np.concatenate(([0.0], np.maximum(isotonic_regression(falls[1:]).x, 0.0)))
    reached = np.flatnonzero(fit >= drop - 1e-12)
    if not len(reached):
        return math.inf
    after = int(reached[0])
    before = after - 1
    share = (drop - fit[before]) / (fit[after] - fit[before])
    return float(rates[before] + share * (rates[after] - rates[before]))


def loss_budget(
    rates: np.ndarray, accuracy_SR: np.ndarray, *, drop: float = 0.01, confidence: float = CONFIDENCE
) -> Estimate:
    """The loss rate at which accuracy, trained and evaluated at that rate, falls by `drop`, and its interval.

    Args:
        rates: (R,), ascending, the first without losses.
        accuracy_SR: (S, R), a row a seed: each seed's falls are taken from its own accuracy without losses.

    The interval inverts a test (Fieller 1954): it begins at the first rate at which Student's paired interval for the
    fall reaches up to `drop`, and ends at the last at which it reaches down to it. At the true budget both hold in
    95 % of studies, however few the seeds, if falls grow along straight lines between the rates tried, as a seed's fall
    is interpolated; where they bend, more seeds do not help, but rates near the budget do. (A falling fit through
    resampled seeds falls by noise alone on a flat curve, which draws such an interval towards small rates.)

    `math.inf` stands for what lies beyond the largest rate: `value` where the fit does not fall so far, `high` where a
    smaller fall is not excluded there, `low` where it is shown there.
    """
    falls_SR = np.asarray(accuracy_SR, dtype=float)
    falls_SR = falls_SR[:, :1] - falls_SR
    value = budget_of_falls(rates, falls_SR.mean(0), drop)
    if len(falls_SR) < 2:
        return Estimate(value, 0.0, math.inf)
    fine = np.unique(np.concatenate([rates, np.linspace(rates[0], rates[-1], GRID)]))
    fine_SF = np.array([np.interp(fine, rates, falls) for falls in falls_SR])
    mean = fine_SF.mean(0)
    half = stats.t.ppf((1 + confidence) / 2, len(fine_SF) - 1) * stats.sem(fine_SF, axis=0)
    may_reach = np.flatnonzero(mean + half >= drop - 1e-12)  # rates at which a fall of `drop` is not excluded
    may_miss = np.flatnonzero(mean - half <= drop + 1e-12)  # rates at which a smaller fall is not excluded
    low = float(fine[may_reach[0]]) if len(may_reach) else math.inf
    high = math.inf if may_miss[-1] == len(fine) - 1 else float(fine[may_miss[-1]])
    return Estimate(value, low, high)
