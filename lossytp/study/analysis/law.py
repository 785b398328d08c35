"""Fit one law to all arms: the fall in accuracy is a power of the expected squared error of a sum.

Shapes: A arms.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import curve_fit

from lossytp.network.theory import expected_squared_error, missing_share
from lossytp.study.comparisons import with_falls
from lossytp.study.statistics import Estimate
from lossytp.training.config import TrainConfig

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
        if config.dataset in base
        and _shares_settings(config, base[config.dataset])
        and compared["loss_rate"].iloc[number] > 0
        and np.isfinite(compared["difference"].iloc[number])
    ]
    rows, configs = with_falls(compared.iloc[chosen]), [configs[number] for number in chosen]
    table = pd.DataFrame(
        {
            **{name: rows[name].to_list() for name in ("arm", "task", "loss_rate", "seeds", "fall", "low", "high")},
            "algorithm": [config.algorithm for config in configs],
            "ranks": [config.tensor_parallel_size for config in configs],
            "repair": [config.repair for config in configs],
            "both_phases": [not config.reliable_gather for config in configs],
            "squared_error": [relative_squared_error(config, coherence[config.dataset]) for config in configs],
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
    return config.repair.partition("(")[0] in RESTORE_OR_NOTHING and "+" not in config.repair


def _shares_settings(config: TrainConfig, base: TrainConfig) -> bool:
    return leaves_zeros(config) and all(getattr(config, name) == getattr(base, name) for name in HELD_FIXED)


def relative_squared_error(config: TrainConfig, coherence: Mapping[str, float]) -> float:
    """Return the expected squared error of a run's sums, relative, given the coherence by number of ranks."""
    ranks = config.tensor_parallel_size
    return expected_squared_error(config.wiring(), ranks, config.process().loss_rate, coherence[str(ranks)])


def _missing_share(config: TrainConfig) -> float:
    return missing_share(config.wiring(), config.tensor_parallel_size, config.process().loss_rate)
