"""Draw predictions of new arms against what was measured afterwards."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lossytp.study.analysis.law import PowerLaw
from lossytp.study.figures.style import COLUMN, FALL, POINTS, estimates, marker_of, shared_legend


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
