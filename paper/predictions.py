"""Does inference predict the cost in training, for new networks? Predictions are committed before the runs."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.optimize import brentq, curve_fit
from scipy.stats import t

from lossytp.network.checks import check_at_least
from lossytp.parallel.convert import parallelize
from lossytp.study.statistics import CONFIDENCE, Estimate, t_interval
from lossytp.study.style import COLUMN, marker_of, shared_legend
from lossytp.study.tables import LOSSLESS
from lossytp.training.config import TrainConfig
from lossytp.training.corpus import corpus
from lossytp.training.models import load_model, load_tokenizer
from lossytp.training.text import all_blocks, token_losses
from paper.comparisons import json_rows, lossy_changes
from paper.law import FIRST_GUESS, RISE, SQUARED_ERROR, check_determined, check_enough, power, with_standard_errors
from paper.study import HEADLINE, POINTS, Claim, Results, Study, claim, row_of

BOUNDS = ((0.0, 0.1), (10.0, 5.0))  # of scale and exponent, far from all fits
LARGEST_SCATTER = 3.0  # of the arms about the law, as a share of the fall


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
        runs: from `read_experiment`, of one task, with its lossless arm.

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


def predicted_and_measured(table: pd.DataFrame) -> Figure:
    """Draw measured falls against predicted ones, one panel a predictor, one marker a class of arms.

    Bars are prediction intervals, around the prediction; hollow marks lie outside of theirs.

    Args:
        table: from `with_measured`.
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


@claim
def inference_predicts_new_networks(results: Results) -> Claim:
    """Require that the intervals of the rise in inference hold nine of ten networks.

    On the networks that both predict, its error must be at most the law's.
    """
    row = row_of(results["prediction_scores"], predictor="inference rise", kind="all")
    errors = {name: POINTS * error for name, error in results["shared_prediction_errors"].items()}
    held = row["covered"] / row["arms"]
    return Claim(held >= 0.9 and errors["inference rise"] <= errors["squared error"], {"share held": held, **errors})


@claim
def falls_exceed_predictions(results: Results) -> Claim:
    """Require that falls exceed predictions on average, and that the new lossless runs are better than others."""
    numbers = {row["predictor"]: POINTS * row["bias"] for row in results["prediction_scores"] if row["kind"] == "all"}
    numbers["lossless"] = POINTS * results["lossless_of_new_seeds"]
    return Claim(min(numbers.values()) > 0, numbers)


class InferenceProbe:
    """A pretrained language model, some texts, and its cross-entropy on them without losses.

    The texts form batches of the training run's shape, so that messages have as many packets as in training.

    Args:
        model_name: the model that runs start from.
        batch_size: B.
        length: T.
        batches: number of batches, so N = B * batches.
        text: files by pattern, of the kind that the model was pretrained on. (On text that it predicts badly, losses
            hardly show.)

    Raises:
        ValueError: if `batches` is below 1.
    """

    def __init__(self, model_name: str, *, batch_size: int, length: int, batches: int = 2, text: str) -> None:
        check_at_least("batches", batches, 1)
        self.dense: Any = load_model(model_name).eval()
        documents, number = corpus(text, split="validation"), batch_size * batches
        blocks_NT = all_blocks(documents, load_tokenizer(model_name), block_size=length, at_most=number)
        self.batches_BT = blocks_NT.split(batch_size)
        self.lossless = self._score(self.dense)

    def rise(self, config: TrainConfig, *, draws: int = 6) -> Estimate:
        """Return the rise of the cross-entropy over a run's network, in nats a token.

        The interval is Student's over S draws of losses.
        """
        return t_interval(self.rises(config, draws))

    def rises(self, config: TrainConfig, draws: int) -> np.ndarray:
        """Return the rise of each draw of losses, (S,)."""
        network = config.network.build()
        model: Any = parallelize(
            self.dense, network, tensor_parallel_size=config.network.tensor_parallel_size, comm=config.comm()
        )
        rises_S = []
        for draw in range(draws):
            with network.evaluation(draw):
                rises_S.append(self._score(model) - self.lossless)
        return np.array(rises_S)

    def _score(self, model: Any) -> float:
        """Return the mean cross-entropy of a token given the earlier ones, over texts and ranks."""
        return float(np.mean([token_losses(model, batch_BT).mean().item() for batch_BT in self.batches_BT]))
