"""Compare this machine's runs with the published runs of the same cells."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lossytp.study.grid import Experiment
from lossytp.study.style import COLUMN, marker_of
from lossytp.study.tables import ACCURACIES, final_accuracies
from lossytp.training.record import read_record
from paper.inference import InferenceConfig
from paper.study import band, loss_rate_axis

ACCURACY_BOUND = 0.01  # two kinds of processor differed by at most 0.0033 in 26 pairs of the paper's runs
NATS_BOUND = 0.01
MEASURES = {"accuracy_lossy": "accuracy with losses", "accuracy_clean": "accuracy without"}
YES, NO, OTHER_DATA = "yes", "no", "other data"


def compare_runs(experiments: Iterable[Experiment], published: Path) -> pd.DataFrame:
    """Compare every cell's record with the published one of the same name.

    Packets lost must be equal: they depend on the seed alone. Accuracies may differ by `ACCURACY_BOUND`, because other
    processors round differently. Accuracies of a run that diverged are those of `final_accuracies`; if only one
    of the two diverged or stopped early, no value agrees. Cells with other data, such as another Python's text, cannot
    be compared.

    Args:
        experiments: whose cells are finished.
        published: the results folder with the published records, below "runs".

    Returns:
        One row per cell and measure: `task`, `arm`, `loss_rate`, `seed`, `measure`, `published`, `here`, `difference`
        and `agrees` ("yes", "no" or "other data").

    Raises:
        ValueError: if a record is missing.
    """
    rows: list[dict[str, Any]] = []
    for cell in (cell for experiment in experiments for cell in experiment.cells):
        folder = Path(cell.config.output.output_dir)
        here, there = _record(folder), _record(published / "runs" / folder.name)
        same_data = here["data"]["sha256"] == there["data"]["sha256"]
        what = {"task": cell.config.task, "arm": cell.arm, "loss_rate": cell.config.network.process_rate}
        what["seed"] = cell.config.network.seed
        both = [final_accuracies(record) for record in (there, here)]
        values: list[tuple[str, float, float, float]] = [
            (MEASURES[name], before, now, ACCURACY_BOUND)
            for name in ACCURACIES
            if (before := both[0][name]) is not None and (now := both[1][name]) is not None  # None in pretraining
        ]
        lost = [record["network"]["training"]["lost"] for record in (there, here)]
        values.append(("packets lost in training", *lost, 0))
        same_end = here["status"] == there["status"]
        rows += [what | _compared(*each, same_data, same_end) for each in values]
    return pd.DataFrame(rows)


def compare_inference(here: dict[str, Any], published: dict[str, Any]) -> pd.DataFrame:
    """Compare two tolerance records with the same settings, row by row.

    The text is the sources of Python's standard library, so records of different Pythons cannot be compared.

    Returns:
        Rows as `compare_runs` returns them; `task` is the model's name, and a value is a rise in nats a token.

    Raises:
        ValueError: if the records have different settings or rows.
    """
    cells = [
        [(row["algorithm"], row["repair"], row["loss_rate"]) for row in each["rows"]] for each in (published, here)
    ]
    settings = [InferenceConfig.defaults() | each["config"] for each in (published, here)]  # older ones lack some
    if settings[0] != settings[1] or cells[0] != cells[1]:
        raise ValueError("the tolerance record has other settings than the published one: delete it to measure again")
    same_data = published["environment"]["python"] == here["environment"]["python"]
    return pd.DataFrame(
        [
            {"task": here["config"]["model_name"], "arm": ours["repair"], "loss_rate": ours["loss_rate"]}
            | {"seed": here["config"]["seed"]}
            | _compared("rise in nats", theirs["rise"]["value"], ours["rise"]["value"], NATS_BOUND, same_data)
            for theirs, ours in zip(published["rows"], here["rows"], strict=True)
        ]
    )


def verdict(table: pd.DataFrame) -> str:
    """Return one sentence: how many of the values agree, and what to do about those that do not."""
    counts = table["agrees"].value_counts()
    agree, differ, other = (int(counts.get(each, 0)) for each in (YES, NO, OTHER_DATA))
    text = f"{agree} of {agree + differ} values agree with the published ones"
    if other:
        text += f"; {other} have other data, because this Python's texts differ, and are not compared"
    if differ:
        text += ": see the rows that say no, and report them with the records"
    return text


def _record(folder: Path) -> dict[str, Any]:
    record = read_record(folder)
    if record is None:
        raise ValueError(f"{folder} has no record.json: run its cell first")
    return record


def _compared(
    measure: str, published: float, here: float, bound: float, same_data: bool, same_end: bool = True
) -> dict[str, Any]:
    difference = here - published
    agrees = YES if same_end and abs(difference) <= bound else NO
    return {
        "measure": measure,
        "published": published,
        "here": here,
        "difference": difference,
        "agrees": agrees if same_data else OTHER_DATA,
    }


# Draw this machine's runs on the published curve.


def reproduced_on_published(published: pd.DataFrame, here: pd.DataFrame) -> Figure:
    """Draw accuracy against loss rate: the published mean with its 95 % interval, and this machine's single runs.

    A hollow mark is the published run of the same cell. Where both agree, one covers the other.

    Args:
        published: one row per published run, with `loss_rate`, `seed` and `accuracy_lossy`.
        here: the same columns for this machine's runs.
    """
    figure, ax = plt.subplots(figsize=(COLUMN, 2.4), layout="constrained")
    seeds = published["seed"].nunique()
    band(ax, published, "loss_rate", "accuracy_lossy", label=f"published, {seeds} seeds", number=0)
    cells = here.merge(published, on=["loss_rate", "seed"], suffixes=("", "_published"))
    for number, (seed, runs) in enumerate(cells.groupby("seed"), 1):
        rates, marker = runs["loss_rate"], marker_of(number)
        style: dict[str, Any] = {"linestyle": "none", "marker": marker, "color": f"C{number}"}
        ax.plot(rates, runs["accuracy_lossy_published"], **style, markersize=7, markerfacecolor="none")
        ax.plot(rates, runs["accuracy_lossy"], **style, markersize=3.5, label=f"here, seed {seed}")
    loss_rate_axis(ax, published["loss_rate"])
    ax.set_xlabel("packet loss rate, %")
    ax.set_ylabel("test accuracy")
    ax.legend(loc="lower left")
    return figure
