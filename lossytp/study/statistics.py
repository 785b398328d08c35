"""Compute intervals for few seeds, and the loss budget.

Shapes: S seeds, R loss rates in ascending order, N examples.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.optimize import isotonic_regression

CONFIDENCE = 0.95
ONE_POINT = 0.01  # the drop in accuracy that defines the loss budget
GRID = 4001  # number of loss rates at which the budget's interval may end
ROUNDING = 1e-12


class Estimate(NamedTuple):
    """A value and its confidence interval. `math.inf` means beyond the range that was tried."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Return half of the interval's width."""
        return (self.high - self.low) / 2

    def standard_error(self, num_values: int) -> float:
        """Return the standard error of the mean of `num_values` values that has this interval; NaN for one value."""
        return self.half_width / student_quantile(num_values)

    def as_json(self) -> dict[str, float | None]:
        """Return the fields by name, with null for infinity, which JSON lacks."""
        return finite(self._asdict())


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return the values for JSON, which lacks infinity and NaN, with null for them."""
    return {name: each if math.isfinite(each) else None for name, each in values.items()}


def t_interval(values: np.ndarray) -> Estimate:
    """Return the mean of (S,) independent values and Student's 95 % interval, which is infinite for a single value.

    A percentile bootstrap of five values would cover only 84 %.
    """
    values = np.asarray(values, dtype=float)
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean, -math.inf, math.inf)
    half = float(student_quantile(len(values)) * stats.sem(values))
    return Estimate(mean, mean - half, mean + half)


def crossed_interval(values_SN: np.ndarray) -> Estimate:
    """Return the mean of (S, N) values and a 95 % interval for other seeds and other examples.

    The variance of the mean is the sum of two: that of the seeds' means over S, and that of the examples' means over N.
    What belongs to one seed on one example counts in both, so the interval may be a little too wide, and is not too
    narrow. Degrees of freedom follow Satterthwaite, "An approximate distribution of estimates of variance components",
    Biometrics Bulletin 1946. Of a single seed, the interval is over examples alone.
    """
    values_SN = np.asarray(values_SN, dtype=float)
    means = [values_SN.mean(axis) for axis in (0, 1)]
    variances = np.array([each.var(ddof=1) / len(each) if len(each) > 1 else 0.0 for each in means])
    value = float(values_SN.mean())
    if not variances.any():
        return Estimate(value, value, value)
    freedom = np.array([max(len(each) - 1, 1) for each in means])
    values = float(variances.sum() ** 2 / (variances**2 / freedom).sum()) + 1
    half = student_quantile(values) * float(variances.sum()) ** 0.5
    return Estimate(value, value - half, value + half)


def share_interval(hits: int, trials: int) -> Estimate:
    """Return the share of hits and Wilson's 95 % interval, for independent trials."""
    interval = stats.binomtest(hits, trials).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(hits / trials, float(interval.low), float(interval.high))


def student_quantile(num_values: float) -> float:
    """Return the half-width of Student's 95 % interval for the mean of `num_values` values, in standard errors."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, num_values - 1))


def rate_of_drop(rates: np.ndarray, drops: np.ndarray) -> float:
    """Return the smallest loss rate at which accuracy drops by one point, or `math.inf` if it never does.

    The drops are fitted by a curve that never falls: isotonic regression (Barlow et al., 1972), at least 0, linear
    between rates.

    Args:
        rates: (R,), the first without losses.
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
        rates: (R,), the first without losses.
        accuracy_SR: (S, R), trained and evaluated at each rate. Each seed's drops start at its lossless accuracy.

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
