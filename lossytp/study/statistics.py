"""Compute intervals for few seeds.

Shapes: S seeds, N examples.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
ONE_POINT = 0.01  # the drop in accuracy that defines the loss budget


class Estimate(NamedTuple):
    """A value and its confidence interval. `math.inf` means beyond the range that was tried."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Return half of the interval's width."""
        return (self.high - self.low) / 2

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
    num_values = float(variances.sum() ** 2 / (variances**2 / freedom).sum()) + 1
    half = student_quantile(num_values) * float(variances.sum()) ** 0.5
    return Estimate(value, value - half, value + half)


def share_interval(hits: int, trials: int) -> Estimate:
    """Return the share of hits and Wilson's 95 % interval, for independent trials."""
    interval = stats.binomtest(hits, trials).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(hits / trials, float(interval.low), float(interval.high))


def student_quantile(num_values: float) -> float:
    """Return the half-width of Student's 95 % interval for the mean of `num_values` values, in standard errors."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, num_values - 1))
