"""What predicts the cost? The expected squared error of a sum, losses of whole tokens, new networks."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.optimize import curve_fit

from lossytp.study.statistics import Estimate, finite
from lossytp.study.style import COLUMN, estimates, shared_legend
from lossytp.training.config import TrainConfig
from paper.comparisons import json_rows, with_falls
from paper.packet_size import _packet_rates
from paper.study import FALL, HEADLINE, POINTS, Claim, Results, Study, claim, panels, row_of, rows_of, task_name, tasks
from paper.theory import expected_squared_error, missing_share

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
    return expected_squared_error(config.comm(), ranks, config.network.process().loss_rate, coherence[str(ranks)])


def _missing_share(config: TrainConfig) -> float:
    return missing_share(config.comm(), config.network.tensor_parallel_size, config.network.process().loss_rate)


# Relate the fall in accuracy to the bytes that are lost together, at equal loss rate.


# Predict the fall in accuracy of arms that nobody has run, and score the predictions afterwards.
#
# Two predictors: the expected squared error of a sum, in closed form, and the rise of the pretrained model's
# cross-entropy over the same network, which takes seconds to measure. Each predicts by a power law that is fitted to
# finished arms. Shapes: A arms.


REDUCE_PHASE, BOTH_PHASES, TOGETHER = "reduce phase", "both phases", "lost together"  # classes, each with its own laws
SQUARED_ERROR, RISE = "squared error", "inference rise"  # predictors
SHARED = (*(set(HELD_FIXED) - {"loss_type", "mtu_bytes", "control"}), "resync_every")  # settings of all arms


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


# Draw predictions of new arms against what was measured afterwards.


def falls_of_small_packets(arms: pd.DataFrame, law: PowerLaw) -> Figure:
    """Draw the falls with small packets against the squared error of a sum, with their prediction and the law.

    Args:
        arms: from `predict_other_packets`. The filled mark fixes the prediction's scale.
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
        arms: from `law_arms`.
        laws: the fitted law of each task.
    """
    figure, axes = panels(arms["task"], 2.1, equal_falls=True, equal_x=True)
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


# Claims about what predicts the cost: the error of a sum, inference, and the bytes that are lost together.


@claim
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


@claim
def both_phases_cost_more(results: Results) -> Claim:
    """Require that arms that lose in both phases cost more than the law says: all in docstrings, not all in SST-2.

    Arms count if the law expects a fall of more than two standard errors.
    """
    ratios = results["law_both_phases"]
    shares = {task: sum(ratio > 1 for ratio in each) / len(each) for task, each in ratios.items()}
    holds = shares["docstrings"] == 1 and 0.25 < min(shares.values()) < 0.75
    return Claim(holds, {f"share above the law, {task}": share for task, share in shares.items()})


@claim
def arms_scatter_as_seeds_do(results: Results) -> Claim:
    """Require that arms deviate from the law by at most twice what seeds alone make, squared."""
    infinite = math.inf  # which JSON lacks
    scatter = {
        task: infinite if law["chi_squared"] is None else law["chi_squared"] for task, law in results["law"].items()
    }
    return Claim(max(scatter.values()) < 2, scatter)


@claim
def law_misses_rings(results: Results) -> Claim:
    """Require that the law's intervals miss all rings of the reduce phase, from below, and no other network."""
    rows = rows_of(results["predictions"], predictor="squared error")
    missed = [row for row in rows if not row["low"] <= row["measured"] <= row["high"]]
    reduced = [row for row in rows if row["kind"] == "reduce phase"]
    rings = [row for row in reduced if "ring" in row["arm"]]
    times = [row["measured"] / row["fall"] for row in rings]
    numbers = {"missed": len(missed), "rings": len(rings), "reduce phase": len(reduced)}
    return Claim(missed == rings and min(times) > 1, numbers | {"least": min(times), "most": max(times)})


@claim
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
