"""Predict the fall in accuracy of arms that nobody has run, and score the predictions afterwards.

Two predictors: the expected squared error of a sum, in closed form, and the rise of the pretrained model's
cross-entropy over the same network, which takes seconds to measure. Each predicts by a power law that is fitted to
finished arms. Shapes: A arms.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import brentq, curve_fit
from scipy.stats import t

from lossytp.study.analysis.law import (
    FIRST_GUESS,
    HELD_FIXED,
    check_determined,
    check_enough,
    leaves_zeros,
    power,
    relative_squared_error,
    with_standard_errors,
)
from lossytp.study.comparisons import lossy_changes
from lossytp.study.statistics import CONFIDENCE
from lossytp.training.config import TrainConfig

REDUCE_PHASE, BOTH_PHASES, TOGETHER = "reduce phase", "both phases", "lost together"  # classes, each with its own laws
SQUARED_ERROR, RISE = "squared error", "inference rise"  # predictors
SHARED = (*(set(HELD_FIXED) - {"loss_type", "mtu_bytes", "control"}), "resync_every")  # settings of all arms
BOUNDS = ((0.0, 0.1), (10.0, 5.0))  # of scale and exponent, far from all fits
LARGEST_SCATTER = 3.0  # of the arms about the law, as a share of the fall


def kind_of(config: TrainConfig, base: TrainConfig) -> str | None:
    """Return the class of a run with losses, or None if none of the laws is for it.

    A run may differ from `base` only in its network. Runs with `stale` have no law: they fall three times as far as
    others with the same rise.
    """
    if any(getattr(config, name) != getattr(base, name) for name in SHARED) or "stale" in config.repair:
        return None
    if config.loss_type != base.loss_type or config.mtu_bytes != base.mtu_bytes or config.control:
        return TOGETHER
    return REDUCE_PHASE if config.reliable_gather else BOTH_PHASES


def squared_error(config: TrainConfig, base: TrainConfig, coherence: Mapping[str, float]) -> float:
    """Return the expected squared error of a run's sums, or NaN where the law does not apply."""
    applies = kind_of(config, base) in (REDUCE_PHASE, BOTH_PHASES) and leaves_zeros(config)
    return relative_squared_error(config, coherence) if applies else math.nan


def committed(file: Path, new: pd.DataFrame) -> pd.DataFrame | None:
    """Return the predictions that a file holds, or None if there is no file.

    Args:
        file: from an earlier run.
        new: the arms to predict, with `arm` and `loss_rate`.

    Raises:
        ValueError: if the file predicts other arms.
    """
    if not file.exists():
        return None
    predicted = pd.read_csv(file)
    here, asked = (set(zip(each["arm"], each["loss_rate"], strict=True)) for each in (predicted, new))
    if here != asked:
        arm, rate = min(here ^ asked)
        raise ValueError(f"{file} and the grid differ in {arm!r} at {rate:g}: give another results_dir, or its grid")
    return predicted


def predict_arms(finished: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Predict new arms from finished ones by both predictors, with a law for each class.

    Args:
        finished: one row per arm, with `kind`, `squared_error` (NaN where it does not apply), `rise` with its standard
            error `rise_error`, and `fall` with its `standard_error`. Arms without one are left out.
        new: the same columns but the last two, and any that name the arm.

    Returns:
        A row for each new arm and predictor that applies: the columns that name the arm, `kind`, `predictor`, its value
        `x`, and the columns of `Predictor.predict`.
    """
    predictors = {SQUARED_ERROR: "squared_error", RISE: "rise"}
    finished = with_standard_errors(finished)
    tables = []
    for predictor, column in predictors.items():
        for kind, ours in new[new[column].notna()].groupby("kind", sort=False):
            known = finished[(finished["kind"] == kind) & (finished[column] > 0)]
            law = fit_predictor(*(known[name].to_numpy() for name in (column, "fall", "standard_error")))
            x_error = ours["rise_error"].to_numpy() if predictor == RISE else np.zeros(len(ours))
            named = ours.drop(columns=["squared_error", "rise", "rise_error"]).assign(
                predictor=predictor, x=ours[column]
            )
            predicted = law.predict(ours[column].to_numpy(), x_error)
            tables.append(pd.concat([named.reset_index(drop=True), predicted], axis=1))
    return pd.concat(tables, ignore_index=True)


class Predictor(NamedTuple):
    """A power law with what an interval of its predictions needs.

    Attributes:
        scale, exponent: of the law, fall = scale * x ** exponent.
        covariance: of both (2, 2).
        scatter: standard deviation of the arms about the law, as a share of the fall, beyond their seeds' noise.
        arms: number of arms that it was fitted to.
    """

    scale: float
    exponent: float
    covariance: np.ndarray
    scatter: float
    arms: int

    def predict(self, x: np.ndarray, x_error: np.ndarray) -> pd.DataFrame:
        """Predict the mean falls of A arms.

        Args:
            x: (A,) the predictor. Values below 0, which a rise may take by chance, count as 0.
            x_error: (A,) its standard errors.

        Returns:
            Columns `fall`, as a share; its standard `deviation`, from the fit, the scatter and `x_error`; and the
            `freedom`, degrees of freedom of the fit.
        """
        x = np.maximum(np.asarray(x, dtype=float), np.finfo(float).tiny)
        fall = power(x, self.scale, self.exponent)
        slope = self.exponent * power(x, self.scale, self.exponent - 1)
        gradient_A2 = np.stack([fall / self.scale, fall * np.log(x)], axis=1)
        of_fit = np.einsum("ai,ij,aj->a", gradient_A2, self.covariance, gradient_A2)
        variance = of_fit + (self.scatter * fall) ** 2 + (slope * np.asarray(x_error)) ** 2
        return pd.DataFrame({"fall": fall, "deviation": np.sqrt(variance), "freedom": self.arms - 2})


def with_interval(predicted: pd.DataFrame, noise: np.ndarray | float) -> pd.DataFrame:
    """Add 95 % prediction intervals for measured falls as `low` and `high`.

    Args:
        predicted: from `Predictor.predict`.
        noise: standard error of each measured fall, from its seeds.
    """
    half = t.ppf((1 + CONFIDENCE) / 2, predicted["freedom"]) * np.hypot(predicted["deviation"], noise)
    return predicted.assign(low=predicted["fall"] - half, high=predicted["fall"] + half)


def fit_predictor(x: np.ndarray, fall: np.ndarray, standard_error: np.ndarray) -> Predictor:
    """Fit a law to A arms, with the scatter at which they deviate as much as expected.

    The scatter makes chi squared 1 per degree of freedom. If chi squared is below 1 without scatter, there is none.

    Args:
        x: (A,) above 0.
        fall: (A,), as shares.
        standard_error: (A,) of the falls.

    Raises:
        ValueError: if the arms do not determine the law.
    """

    def fit(scatter: float) -> tuple[np.ndarray, np.ndarray, float]:
        law = np.array(FIRST_GUESS)
        for _ in range(20):  # weights depend on the fitted falls
            sigma = np.hypot(standard_error, scatter * power(x, *law))
            law, covariance = curve_fit(power, x, fall, p0=law, sigma=sigma, absolute_sigma=True, bounds=BOUNDS)
        excess = (((fall - power(x, *law)) / sigma) ** 2).sum() / (len(x) - len(law)) - 1
        return law, covariance, float(excess)

    check_enough(len(x))
    scatter = 0.0 if fit(0.0)[2] <= 0 else float(brentq(lambda each: fit(each)[2], 0.0, LARGEST_SCATTER, xtol=1e-4))
    (scale, exponent), covariance, _ = fit(scatter)
    check_determined(covariance, standard_error)
    return Predictor(float(scale), float(exponent), covariance, scatter, len(x))


def with_measured(predicted: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Put what was measured beside predictions, with intervals for the seeds that were run.

    Args:
        predicted: the committed predictions, with `arm`, `loss_rate`, the columns of `Predictor.predict`, and
            `seed_deviation`, of one seed's fall.
        runs: from `records.read_experiment`, of one task, with its lossless arm.

    Returns:
        The predictions whose arms have runs, with `seeds`, the `measured` fall, and `low`, `high` for that many seeds.
    """
    falls = -lossy_changes(runs).set_index(["arm", "loss_rate"])["change"]
    by_arm = falls.groupby(level=[0, 1]).agg(seeds="size", measured="mean").reset_index()
    both = predicted.drop(columns=["low", "high"], errors="ignore").merge(by_arm, on=["arm", "loss_rate"])
    return with_interval(both, both["seed_deviation"] / np.sqrt(both["seeds"]))


def score(predicted: pd.DataFrame) -> pd.DataFrame:
    """Score predictions by class of arm and predictor.

    Args:
        predicted: from `with_measured`.

    Returns:
        A row for each predictor and class, and one for all classes together: `arms`, `covered` (arms whose measured
        fall lies in the interval), `bias` (mean of measured less predicted), `error` (its root mean square) and
        `noise`, the error that seeds alone would make.
    """
    every = pd.concat([predicted, predicted.assign(kind="all")], ignore_index=True)
    rows = []
    for (predictor, kind), ours in every.groupby(["predictor", "kind"], sort=False):
        miss = ours["measured"] - ours["fall"]
        inside = ours["measured"].between(ours["low"], ours["high"])
        rows.append(
            {"predictor": predictor, "kind": kind, "arms": len(ours), "covered": int(inside.sum())}
            | {"bias": float(miss.mean()), "error": math.sqrt(float((miss**2).mean()))}
            | {"noise": math.sqrt(float((ours["seed_deviation"] ** 2 / ours["seeds"]).mean()))}
        )
    return pd.DataFrame(rows)


def shared_errors(measured: pd.DataFrame) -> dict[str, float]:
    """Return each predictor's root mean square error over the networks that all predictors predict.

    Args:
        measured: from `with_measured`.
    """
    missed = measured.assign(missed=measured["measured"] - measured["fall"])
    shared = missed.pivot_table(index=["arm", "loss_rate"], columns="predictor", values="missed").dropna()
    return {str(name): float(np.sqrt((shared[name] ** 2).mean())) for name in shared}
