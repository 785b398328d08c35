"""What predicts the cost? The expected squared error of a sum, losses of whole tokens, new networks."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.optimize import brentq, curve_fit
from scipy.stats import t

from lossytp.network.theory import expected_squared_error, missing_share
from lossytp.study.statistics import CONFIDENCE, Estimate, finite, t_interval
from lossytp.study.style import COLUMN, FALL, POINTS, estimates, label_ends, marker_of, shared_legend, task_name
from lossytp.study.tables import LOSSLESS, json_rows, lossy_changes, with_falls
from lossytp.training.config import TrainConfig
from lossytp.training.shapes import shape_of
from paper.study import HEADLINE, Claim, Results, Study, row_of, rows_of, shown, tasks
from paper.tolerance import _panels

RESTORE_OR_NOTHING = ("zero", "fec", "retransmit")  # repairs that leave zeros where they restore nothing
HELD_FIXED = (  # settings that arms of the law share
    "model_name", "max_steps", "learning_rate", "loss_type", "control", "mtu_bytes", "wire_dtype", "bf16",
    "sequence_parallel", "lossy_direction", "lossy_module", "lossy_layers", "lossy_phase", "gradient_clipping",
    "data_parallel_size", "pipeline_parallel_size", "implementation", "exact_adjoint", "replicated_gradients",
)  # fmt: skip
FIRST_GUESS = (0.6, 1.2)
FEWEST_ARMS = 4  # to fit two parameters and judge the fit


class PowerLaw(NamedTuple):
    """The law fall = scale * error ** exponent, and how well it fits.

    Attributes:
        scale: the fall, as a share, at a relative squared error of 1.
        exponent: 1 means proportional.
        arms: A.
        r_squared: share of the variance of the falls that the law explains.
        chi_squared: squared deviations in standard errors of the falls, for each degree of freedom, relative to what
            seeds alone make; 1 is expected.
    """

    scale: float
    exponent: float
    arms: int
    r_squared: float
    chi_squared: float

    def fall(self, squared_error: np.ndarray) -> np.ndarray:
        """Return the expected falls, as shares, of arms with these expected squared errors (A,)."""
        return self.scale * np.asarray(squared_error) ** self.exponent


def fit_power_law(
    squared_error: np.ndarray, fall: np.ndarray, standard_error: np.ndarray, seeds: np.ndarray
) -> PowerLaw:
    """Fit the law to A arms by least squares, weighted by the falls' standard errors.

    Args:
        squared_error: (A,) expected squared errors of sums.
        fall: (A,) falls, as shares.
        standard_error: (A,) of the falls, estimated from `seeds`.
        seeds: (A,) numbers of seeds. A squared deviation in estimated standard errors is (n - 1) / (n - 3) on average,
            as of Student's t; with three seeds or fewer it has no average, and chi squared is missing.

    Raises:
        ValueError: if the arms do not determine the law.
    """
    check_enough(len(fall))
    law, covariance = curve_fit(power, squared_error, fall, p0=FIRST_GUESS, sigma=standard_error, absolute_sigma=True)
    check_determined(covariance, standard_error)
    residual = fall - power(squared_error, *law)
    squared_t = (residual / standard_error) ** 2
    expected = np.where(seeds > 3, (seeds - 1) / np.maximum(seeds - 3, 1), np.nan)
    return PowerLaw(
        scale=float(law[0]),
        exponent=float(law[1]),
        arms=len(fall),
        r_squared=float(1 - (residual**2).sum() / ((fall - fall.mean()) ** 2).sum()),
        chi_squared=float((squared_t / expected).sum() / (len(fall) - len(law))),
    )


def check_enough(arms: int) -> None:
    """Raise a ValueError if a law has too few arms to be fitted to."""
    if arms < FEWEST_ARMS:
        raise ValueError(f"{arms} arms do not determine a power law: give at least {FEWEST_ARMS}")


def check_determined(covariance: np.ndarray, standard_error: np.ndarray) -> None:
    """Raise a ValueError if a fit's covariance is not finite: `curve_fit` then returns its first guess."""
    if not np.isfinite(covariance).all():
        errors = ", ".join(f"{each:.3g}" for each in standard_error)
        raise ValueError(
            f"falls with standard errors {errors} do not determine a power law: give at least {FEWEST_ARMS} arms with "
            "finite ones above 0"
        )


def with_standard_errors(arms: pd.DataFrame) -> pd.DataFrame:
    """Return the arms that a fit can weigh: a single seed has no standard error, and equal falls have one of 0."""
    return arms[np.isfinite(arms["standard_error"]) & (arms["standard_error"] > 0)]


def law_of(arms: pd.DataFrame, predictor: str = "squared_error") -> PowerLaw:
    """Fit the law to rows of `law_arms`; the column `predictor` stands for the squared error."""
    return fit_power_law(*(arms[name].to_numpy() for name in (predictor, "fall", "standard_error", "seeds")))


def explained_elsewhere(arms: pd.DataFrame, predictor: str) -> float | None:
    """Fit the law to the loss rates of the usual network, and test it on all other arms.

    Args:
        arms: one task's rows of `law_arms` that lose in the reduce phase.
        predictor: the column that stands for the squared error, such as `missing_share`.

    Returns:
        The share of the variance of the other arms' falls that the law explains. None if there are no others, or too
        few usual ones. The others have other algorithms, numbers of ranks and repairs.
    """
    usual = (
        (arms["algorithm"] == "direct") & (arms["repair"] == "zero") & (arms["ranks"] == arms["ranks"].mode().iloc[0])
    )
    if usual.all() or usual.sum() < FEWEST_ARMS:
        return None
    law = law_of(arms[usual], predictor)
    fall = arms.loc[~usual, "fall"].to_numpy()
    residual = fall - law.fall(arms.loc[~usual, predictor].to_numpy())
    return float(1 - (residual**2).sum() / ((fall - fall.mean()) ** 2).sum())


def predict_other_packets(law: PowerLaw, arms: pd.DataFrame, known_rate: float) -> pd.DataFrame:
    """Predict the falls of arms that lose packets of another size than the law's arms.

    The law keeps its exponent. The unrepaired arm at one loss rate fixes its scale.

    Args:
        law: fitted to one task's arms.
        arms: from `law_arms`, of this task and of one packet size.
        known_rate: loss rate of the arm that fixes the scale.

    Returns:
        The arms, with the `predicted` fall, as a share, and whether an arm is `known`.
    """
    known = (arms["loss_rate"] == known_rate) & (arms["repair"] == "zero")
    (fall,), (error,) = arms.loc[known, "fall"], arms.loc[known, "squared_error"]
    predicted = law._replace(scale=fall / error**law.exponent).fall(arms["squared_error"].to_numpy())
    return arms.assign(predicted=predicted, known=known)


def power(squared_error: np.ndarray, scale: float, exponent: float) -> np.ndarray:
    """Return the law's falls (A,)."""
    return scale * squared_error**exponent


def law_arms(
    compared: pd.DataFrame,
    configs: Sequence[TrainConfig],
    base: Mapping[str, TrainConfig],
    coherence: Mapping[str, Mapping[str, float]],
) -> pd.DataFrame:
    """Return the arms that differ only in loss rate, algorithm, ranks, phases and restoring repairs.

    An arm that several experiments have counts once, with the most seeds.

    Args:
        compared: one row per arm and loss rate, from `comparisons.drops_and_gains`.
        configs: a configuration of each row.
        base: a configuration by task. Arms share its settings `HELD_FIXED`.
        coherence: of the ranks' contributions, by task and number of ranks.

    Returns:
        Columns `arm`, `task`, `loss_rate`, `algorithm`, `ranks`, `repair`, `both_phases`, `seeds`; `squared_error`, the
        expected one of a sum, relative; `missing_share`, the expected share of the contributions that a sum lacks; and
        `fall` in accuracy, as a share, with `low`, `high` and `standard_error`.
    """
    chosen = [
        number
        for number, config in enumerate(configs)
        if config.data.dataset in base
        and _shares_settings(config, base[config.data.dataset])
        and compared["loss_rate"].iloc[number] > 0
        and np.isfinite(compared["difference"].iloc[number])
    ]
    rows, configs = with_falls(compared.iloc[chosen]), [configs[number] for number in chosen]
    table = pd.DataFrame(
        {
            **{name: rows[name].to_list() for name in ("arm", "task", "loss_rate", "seeds", "fall", "low", "high")},
            "algorithm": [config.network.algorithm for config in configs],
            "ranks": [config.network.tensor_parallel_size for config in configs],
            "repair": [config.network.repair for config in configs],
            "both_phases": [not config.network.reliable_gather for config in configs],
            "squared_error": [relative_squared_error(config, coherence[config.data.dataset]) for config in configs],
            "missing_share": [_missing_share(config) for config in configs],
        }
    )
    estimates = table[["fall", "low", "high", "seeds"]].itertuples(index=False, name=None)
    table["standard_error"] = np.array([Estimate(*each).standard_error(seeds) for *each, seeds in estimates], float)
    where = ["task", "loss_rate", "algorithm", "ranks", "repair", "both_phases"]
    table = table.sort_values("seeds", ascending=False, kind="stable").drop_duplicates(where)
    return table.sort_values(["task", "squared_error"], kind="stable").reset_index(drop=True)


def leaves_zeros(config: TrainConfig) -> bool:
    """Return whether the repair leaves zeros where it restores nothing, as the law needs."""
    return config.network.repair.partition("(")[0] in RESTORE_OR_NOTHING and "+" not in config.network.repair


def _equal(config: TrainConfig, base: TrainConfig, names: Sequence[str]) -> bool:
    """Return whether two configurations have the same values of these settings."""
    ours, theirs = config.as_dict(), base.as_dict()
    return all(ours[name] == theirs[name] for name in names)


def _shares_settings(config: TrainConfig, base: TrainConfig) -> bool:
    return leaves_zeros(config) and _equal(config, base, HELD_FIXED)


def relative_squared_error(config: TrainConfig, coherence: Mapping[str, float]) -> float:
    """Return the expected squared error of a run's sums, relative, given the coherence by number of ranks."""
    ranks = config.network.tensor_parallel_size
    return expected_squared_error(config.wiring(), ranks, config.network.process().loss_rate, coherence[str(ranks)])


def _missing_share(config: TrainConfig) -> float:
    return missing_share(config.wiring(), config.network.tensor_parallel_size, config.network.process().loss_rate)


# Relate the fall in accuracy to the bytes that are lost together, at equal loss rate.


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


# Predict the fall in accuracy of arms that nobody has run, and score the predictions afterwards.
#
# Two predictors: the expected squared error of a sum, in closed form, and the rise of the pretrained model's
# cross-entropy over the same network, which takes seconds to measure. Each predicts by a power law that is fitted to
# finished arms. Shapes: A arms.


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
    if not _equal(config, base, SHARED) or "stale" in config.network.repair:
        return None
    if (
        config.network.loss_type != base.network.loss_type
        or config.network.mtu_bytes != base.network.mtu_bytes
        or config.network.control
    ):
        return TOGETHER
    return REDUCE_PHASE if config.network.reliable_gather else BOTH_PHASES


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


# Draw predictions of new arms against what was measured afterwards.


def predicted_and_measured(table: pd.DataFrame) -> Figure:
    """Draw measured falls against predicted ones, one panel a predictor, one marker a class of arms.

    Bars are prediction intervals, around the prediction; hollow marks lie outside of theirs.

    Args:
        table: from `analysis.predictions.with_measured`.
    """
    predictors = list(dict.fromkeys(table["predictor"]))
    kinds = list(dict.fromkeys(table["kind"]))
    figure, axes_1P = plt.subplots(
        1, len(predictors), figsize=(COLUMN, 2.2), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    top = POINTS * float(table[["fall", "measured"]].max().max()) * 1.05
    for ax, predictor in zip(axes_1P[0], predictors, strict=True):
        rows = table[table["predictor"] == predictor]
        ax.plot([0, top], [0, top], color="0.6", linewidth=0.8, zorder=0)
        for number, kind in enumerate(kinds):
            ours = rows[rows["kind"] == kind]
            inside = ours["measured"].between(ours["low"], ours["high"])
            fall, measured = POINTS * ours["fall"], POINTS * ours["measured"]
            style = {"marker": marker_of(number), "edgecolor": f"C{number}", "s": 12, "linewidth": 0.8}
            ax.scatter(fall[inside], measured[inside], facecolor=f"C{number}", label=kind, **style)
            ax.scatter(fall[~inside], measured[~inside], facecolor="white", **style)
        band = rows.sort_values("fall")
        ax.vlines(
            POINTS * band["fall"], POINTS * band["low"], POINTS * band["high"], color="0.85", linewidth=1, zorder=-1
        )
        ax.set(
            title=predictor,
            xlabel="predicted fall, points",
            xlim=(-0.5, top),
            ylim=(min(-1.0, POINTS * float(np.min(table["measured"])) - 0.5), top),
        )
    axes_1P[0, 0].set_ylabel("measured fall, points")
    shared_legend(figure, axes_1P[0, -1])
    return figure


def falls_of_small_packets(arms: pd.DataFrame, law: PowerLaw) -> Figure:
    """Draw the falls with small packets against the squared error of a sum, with their prediction and the law.

    Args:
        arms: from `analysis.law.predict_other_packets`. The filled mark fixes the prediction's scale.
        law: of the usual packets.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 2.5), layout="constrained")
    error = np.linspace(0, arms["squared_error"].max(), 200)
    (scale,) = arms.loc[arms["known"], "predicted"] / law.fall(arms.loc[arms["known"], "squared_error"].to_numpy())
    ax.plot(error, POINTS * law.fall(error), color="0.6", linewidth=1, linestyle="--", label="law, usual packets")
    ax.plot(error, POINTS * scale * law.fall(error), color="0.2", linewidth=1, label="predicted, small packets")
    names = arms["repair"].where(arms["repair"] != "zero", "small packets").where(~arms["known"], "fixes the scale")
    for number, name in enumerate(dict.fromkeys(names)):
        rows = arms[names == name]
        fill = f"C{number}" if name == "fixes the scale" else "white"
        estimates(
            ax, rows["squared_error"], POINTS * rows[FALL], number, markersize=4, elinewidth=1, label=name,
            markerfacecolor=fill,
        )  # fmt: skip
    ax.set(
        xlabel="expected squared error of a sum",
        ylabel="fall in accuracy, points",
        ylim=(min(0, ax.get_ylim()[0]), None),
    )
    shared_legend(figure, ax, max_columns=2)
    return figure


def collapse(arms: pd.DataFrame, laws: dict[str, PowerLaw]) -> Figure:
    """Draw the fall against the expected squared error of a sum: all arms on one curve, one panel per task.

    Args:
        arms: from `analysis.law.law_arms`.
        laws: the fitted law of each task.
    """
    figure, axes = _panels(arms["task"], 2.1, equal_falls=True, equal_x=True)
    every_kind = list(dict.fromkeys(map(str, _kinds(arms))))
    for ax, (task, ours) in zip(axes, arms.groupby("task", sort=False), strict=True):
        kinds = _kinds(ours)
        for kind in dict.fromkeys(kinds):
            number = every_kind.index(str(kind))
            rows = ours[kinds == kind]
            fill = "white" if kind == "both phases" else f"C{number}"
            estimates(ax, rows["squared_error"], POINTS * rows[FALL], number, label=str(kind), markerfacecolor=fill)
        errors = np.linspace(0, ours.loc[~ours["both_phases"], "squared_error"].max(), 200)
        law = laws[str(task)]
        ax.plot(errors, POINTS * law.fall(errors), color="0.2", linewidth=1, zorder=0)
        ax.set_title(f"{task_name(task)}: R² = {law.r_squared:.3f}")
    axes[0].set_ylabel("fall in accuracy, points")
    figure.supxlabel("expected squared error of a sum, relative", fontsize="medium")
    axes[-1].legend(loc="upper left", fontsize=5.5, handletextpad=0.2, borderpad=0)
    return figure


def cost_against_bytes(table: pd.DataFrame) -> Figure:
    """Draw the fall at one loss rate against the bytes that are lost together, one line per task.

    Args:
        table: from `analysis.together.lost_together`.
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


def _kinds(arms: pd.DataFrame) -> pd.Series:
    """Return what sets each arm apart from the curve over loss rates, for the legend."""
    kinds = pd.Series("direct, 4 ranks", index=arms.index)
    kinds[arms["ranks"] != arms["ranks"].mode().iloc[0]] = "2 or 8 ranks"
    kinds[arms["algorithm"] != "direct"] = "ring, tree, switch"
    kinds[arms["repair"] != "zero"] = "FEC, retransmission"
    kinds[arms["both_phases"]] = "both phases"
    return kinds


SMALL_PACKETS = "01_tolerance_of_small_packets"


def law(study: Study) -> dict[str, Any]:
    """Return the one law: the fall against the expected squared error of a sum."""
    configs_of_headline = [TrainConfig.from_dict(record["config"]) for record in study.records[HEADLINE]]
    base = {config.data.dataset: config for config in configs_of_headline if config.network.process_rate == 0}
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
    config = next(each for each in study.configs(SMALL_PACKETS) if each.network.process_rate)
    task = config.data.dataset
    arms = arms_like({task: base[task].replace(mtu_bytes=config.network.mtu_bytes)})
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


# Claims about what predicts the cost: the error of a sum, inference, and the bytes that are lost together.


def one_law(results: Results) -> Claim:
    """Require that the law explains over 97 % of the variance, and predicts more than the share missing does.

    The costliest arm of each task must be a ring of eight ranks.
    """
    shares = {task: law["r_squared"] for task, law in results["law"].items()}
    elsewhere = results["law_elsewhere"]
    better = all(each["squared_error"] > each["missing_share"] for each in elsewhere.values())
    numbers = {
        f"{task}, elsewhere by {name}": share for task, each in elsewhere.items() for name, share in each.items()
    }
    reduced = [row for row in results["law_arms"] if not row["both_phases"]]
    costliest = [
        max((row for row in reduced if row["task"] == task), key=lambda row: row["squared_error"])
        for task in tasks(results)
    ]
    rings = all((row["algorithm"], row["ranks"]) == ("ring", 8) for row in costliest)
    return Claim(better and rings and all(share > 0.97 for share in shares.values()), shares | numbers)


def both_phases_cost_more(results: Results) -> Claim:
    """Require that arms that lose in both phases cost more than the law says: all in docstrings, not all in SST-2.

    Arms count if the law expects a fall of more than two standard errors.
    """
    ratios = results["law_both_phases"]
    shares = {task: sum(ratio > 1 for ratio in each) / len(each) for task, each in ratios.items()}
    holds = shares["docstrings"] == 1 and 0.25 < min(shares.values()) < 0.75
    return Claim(holds, {f"share above the law, {task}": share for task, share in shares.items()})


def arms_scatter_as_seeds_do(results: Results) -> Claim:
    """Require that arms deviate from the law by at most twice what seeds alone make, squared."""
    infinite = math.inf  # which JSON lacks
    scatter = {
        task: infinite if law["chi_squared"] is None else law["chi_squared"] for task, law in results["law"].items()
    }
    return Claim(max(scatter.values()) < 2, scatter)


def law_misses_rings(results: Results) -> Claim:
    """Require that the law's intervals miss all rings of the reduce phase, from below, and no other network."""
    rows = rows_of(results["predictions"], predictor="squared error")
    missed = [row for row in rows if not row["low"] <= row["measured"] <= row["high"]]
    reduced = [row for row in rows if row["kind"] == "reduce phase"]
    rings = [row for row in reduced if "ring" in row["arm"]]
    times = [row["measured"] / row["fall"] for row in rings]
    numbers = {"missed": len(missed), "rings": len(rings), "reduce phase": len(reduced)}
    return Claim(missed == rings and min(times) > 1, numbers | {"least": min(times), "most": max(times)})


def inference_predicts_new_networks(results: Results) -> Claim:
    """Require that the intervals of the rise in inference hold nine of ten networks.

    On the networks that both predict, its error must be at most the law's.
    """
    row = row_of(results["prediction_scores"], predictor="inference rise", kind="all")
    errors = {name: POINTS * error for name, error in results["shared_prediction_errors"].items()}
    held = row["covered"] / row["arms"]
    return Claim(held >= 0.9 and errors["inference rise"] <= errors["squared error"], {"share held": held, **errors})


def falls_exceed_predictions(results: Results) -> Claim:
    """Require that falls exceed predictions on average, and that the new lossless runs are better than others."""
    numbers = {row["predictor"]: POINTS * row["bias"] for row in results["prediction_scores"] if row["kind"] == "all"}
    numbers["lossless"] = POINTS * results["lossless_of_new_seeds"]
    return Claim(min(numbers.values()) > 0, numbers)


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


def packet_size_matters(results: Results) -> Claim:
    """Require in each task that packets of 1500 bytes cost more than the smallest; the largest are not shown to."""
    lows = {row["task"]: POINTS * row["low"] for row in rows_of(results["packet_size"], mtu_bytes=1500)}
    planned = rows_of(results["comparisons"]["10_packets_again"], arm="packets of 9000 bytes")
    holds = len(lows) == len(planned) == len(tasks(results)) and not any(shown(row["gain_p_holm"]) for row in planned)
    return Claim(holds and min(lows.values()) > 0, lows)


def law_holds_for_small_packets(results: Results) -> Claim:
    """Require that the intervals of all new falls without repair, with small packets, hold the prediction.

    At 30 % loss the interval must not hold the law of the usual packets.
    """
    new = rows_of(results["small_packets"], known=False, repair="zero")
    holds = len(new) == 3 and all(row["low"] <= row["predicted"] <= row["high"] for row in new)
    law, most = results["law"]["docstrings"], row_of(new, loss_rate=0.3)
    unscaled = law["scale"] * most["squared_error"] ** law["exponent"]
    numbers = {f"at {row['loss_rate']:g}, less predicted": POINTS * (row["fall"] - row["predicted"]) for row in new}
    numbers["most at 0.3"], numbers["usual packets"] = POINTS * most["high"], POINTS * unscaled
    return Claim(holds and unscaled > most["high"], numbers)


def shared_losses_cost_more(results: Results) -> Claim:
    """Require that losses that strike all links at once cost more than each link's own, in each task."""
    rows = [row_of(results["comparisons"]["02_shared"], task=task, arm="losses all shared") for task in tasks(results)]
    return Claim(all(row["gain_high"] < 0 for row in rows), {row["task"]: POINTS * row["gain_high"] for row in rows})


CLAIMS = (
    one_law,
    both_phases_cost_more,
    arms_scatter_as_seeds_do,
    law_misses_rings,
    inference_predicts_new_networks,
    falls_exceed_predictions,
    bytes_lost_together_cost_more,
    packet_size_matters,
    law_holds_for_small_packets,
    shared_losses_cost_more,
)
