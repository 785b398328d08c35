"""The paper's experiments with their finished records, what claims share, and the typesetting."""

import argparse
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import typst
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lossytp.study.grid import Experiment, load_experiments
from lossytp.study.statistics import CONFIDENCE, ONE_POINT, t_interval
from lossytp.study.style import COLUMN, marker_of, save
from lossytp.study.tables import read_experiment
from lossytp.training.command_line import run_as_command
from lossytp.training.config import TrainConfig
from paper.comparisons import TRAINING, complete_seeds, drops_and_gains, mean_by_arm, traffic_costs, unlearned_trainings

NAMED_APART = 4  # the least ratio of two labelled rates whose labels do not overlap
POINTS = 100  # in a share of 1
FALL = ["fall", "low", "high"]  # columns of a fall and its interval
MILLION = 1e6
TASK_NAMES = {"sst2_held_out": "SST-2", "sst2": "SST-2", "qnli": "QNLI", "mnli": "MNLI subset"}
LABEL_GAP = 0.09  # of a panel's height, between two labels
FEWEST_SEEDS = 3  # an interval of two says nothing
HEADLINE = "01_tolerance"
NOT_COMPARED = (
    "08_robustness",
    "11_pretraining",
    "12_predictions",
    "15_sizes",
    "18_pretraining_gpt2",
    "18_pretraining_gpt2_jumbo",
)  # they have an analysis of their own


@dataclass(frozen=True)
class Study:
    """A profile's experiments, with the records that are finished."""

    profile: str
    results: Path
    experiments: dict[str, Experiment]
    tables: dict[str, pd.DataFrame]
    records: dict[str, list[dict]]
    figures: dict[str, Figure] = field(default_factory=dict)

    @classmethod
    def read(cls, results: Path, experiments: Path, profile: str) -> "Study":
        """Read the records of a profile's experiments.

        Raises:
            ValueError: if a grid is wrong, or no seed of the headline has all its records, or, in a profile without a
                headline, no cell has its record.
        """
        loaded = {each.name: each for each in load_experiments(experiments, profile, results)}
        read = {name: read_experiment(experiment) for name, experiment in loaded.items()}
        study = cls(
            profile,
            results,
            loaded,
            {name: table for name, (table, _) in read.items()},
            {name: records for name, (_, records) in read.items()},
        )
        if study.complete(HEADLINE, 1)[0].empty if HEADLINE in loaded else not study.every_record:
            which = f"seed of {HEADLINE} has all its records" if HEADLINE in loaded else "cell has its record"
            raise ValueError(f"no {which} in {results}: run ./run_all.sh {profile} first")
        return study

    @property
    def every_record(self) -> list[dict]:
        """Return the records of all experiments. A record that several experiments share occurs once for each."""
        return [record for records in self.records.values() for record in records]

    @cached_property
    def baselines(self) -> dict[str, Any]:
        """Return, by task, what `15_task_baseline` measured."""
        found: dict[str, Any] = json.loads((self.results / "baseline.json").read_text(encoding="utf-8"))
        return found

    def complete(self, name: str, seeds: int = FEWEST_SEEDS) -> tuple[pd.DataFrame, list[dict]]:
        """Return the runs and records of an experiment's complete seeds; none if the profile lacks it."""
        if name not in self.experiments:
            return pd.DataFrame(), []
        left_out = unlearned_trainings(self.tables[name])
        return complete_seeds(self.experiments[name], self.tables[name], self.records[name], left_out, seeds)

    def arms_with_seeds(self, name: str) -> pd.DataFrame:
        """Return the runs of an experiment's arms that have enough seeds; none if the profile lacks it."""
        runs = self.tables.get(name, pd.DataFrame())
        if runs.empty:
            return runs
        seeds = runs.groupby(["arm", "loss_rate"])["seed"].transform("nunique")
        return runs[seeds >= FEWEST_SEEDS].reset_index(drop=True)

    @cached_property
    def comparisons(self) -> dict[str, pd.DataFrame]:
        """Return, by experiment, its arms compared with the lossless arm and the reference, with costs and errors."""
        return {
            name: compared
            for name in self.experiments
            if name not in NOT_COMPARED and (compared := self._compare(name)) is not None
        }

    def configs(self, name: str) -> list[TrainConfig]:
        """Return a configuration of each row of an experiment's comparison."""
        where = [*TRAINING, "arm", "loss_rate"]
        table, records = self.complete(name, 1 if name == HEADLINE else FEWEST_SEEDS)
        firsts = table.drop_duplicates(where).set_index(where)
        numbers = dict(zip(firsts.index, table.drop_duplicates(where).index, strict=True))
        rows = self.comparisons[name][where].itertuples(index=False, name=None)
        return [TrainConfig.from_dict(records[numbers[row]]["config"]) for row in rows]

    def _compare(self, name: str) -> pd.DataFrame | None:
        table, records = self.complete(name, 1 if name == HEADLINE else FEWEST_SEEDS)
        if table.empty:
            return None
        reference = None if name == HEADLINE else self.experiments[name].reference
        compared = drops_and_gains(table, reference=reference)
        return compared.merge(mean_by_arm(table, [traffic_costs(record) for record in records]), how="left")

    def draw(self, figure: Figure, name: str) -> None:
        """Save a figure, and keep it for the notebook."""
        save(figure, self.results / "figures", name)
        self.figures[name] = figure


# Share what claims need: their type, and rows of the results. Falls are in points, rises in nats a token.


USUAL = {"algorithm": "direct", "phase": "reduce", "losses": "single"}  # of most of the real model's rows
Results = dict[str, Any]


class Claim(NamedTuple):
    """Whether a claim's sentence is true, and the numbers that decide."""

    holds: bool
    numbers: dict[str, float]


CLAIMS: dict[str, Callable[[Results], Claim]] = {}
"""All claims by name: conditions on the results. Modules of `paper` register theirs with `claim`."""


def claim(condition: Callable[[Results], Claim]) -> Callable[[Results], Claim]:
    """Register a function as the claim of its name: `#claim("name")[sentence]` in the paper's text."""
    CLAIMS[condition.__name__] = condition
    return condition


def tasks(results: Results) -> list[str]:
    """Return the names of the study's tasks."""
    return list(results["tasks"])


def rows_of(rows: Iterable[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows that have the wanted values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def row_of(rows: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """Return the row that has the wanted values.

    Raises:
        ValueError: if there is not exactly one.
    """
    found = rows_of(rows, **wanted)
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows have {wanted}: give values that one row has")
    return found[0]


def real_row(results: Results, **wanted: Any) -> dict[str, Any]:
    """Return the real model's one row with these values, of the usual network where they do not say otherwise."""
    return row_of(results["real_model"], **USUAL | wanted)


def better(row: dict[str, Any], name: str) -> bool:
    """Return whether a row's column is positive, and shown to be."""
    return bool(row[name] > 0 and shown(row[f"{name}_p_holm"]))


def shown(p: float | None) -> bool:
    """Return whether a corrected p-value shows a difference; null stands for a test that was not possible."""
    return p is not None and p < 1 - CONFIDENCE


# Compile the paper: `python -m paper.study paper/lossytp.typ OUTPUT.pdf --results results/laptop`.


def typeset(source: Path, output: Path, results: Path) -> None:
    """Compile `source` to a PDF, which appears only once it is complete.

    Paths are relative to the working folder. The paper may read files below that folder only.

    Args:
        source: the Typst file.
        output: the PDF.
        results: the folder that the paper reads its numbers and figures from.

    Raises:
        ValueError: if the text has an error, or `output` cannot be a file.
    """
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"{output} is a folder, or its folder does not exist: give a file in an existing folder")
    part = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        typst.compile(
            source,
            output=part,
            root=Path.cwd(),
            sys_inputs={"results": f"/{results.as_posix()}"},
            timestamp=datetime(2026, 1, 1, tzinfo=UTC),  # equal text and results give equal files
        )
    except RuntimeError as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from error
    part.replace(output)


def main() -> None:
    """Compile the paper as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    typeset(arguments.source, arguments.output, arguments.results)


if __name__ == "__main__":
    run_as_command(main)


def panels(
    tasks: pd.Series, height: float, *, equal_falls: bool = False, equal_x: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each task, side by side."""
    number = tasks.nunique()
    figure, axes_1T = plt.subplots(
        1, number, figsize=(COLUMN, height), layout="constrained", squeeze=False,
        sharex=equal_x, sharey=equal_falls,
    )  # fmt: skip
    return figure, list(axes_1T[0])


def one_point(ax: Axes) -> None:
    """Draw the line of one point."""
    ax.axhline(POINTS * ONE_POINT, color="0.5", linewidth=0.8, linestyle="--", zorder=0)


def task_name(task: object) -> str:
    """Return a task's name as figures write it."""
    return TASK_NAMES.get(str(task), str(task))


def band(ax: Axes, runs: pd.DataFrame, x: str, y: str, *, label: str, number: int) -> None:
    """Plot the mean of column `y` over seeds, with its 95 % interval, against column `x`.

    Args:
        ax: the panel.
        runs: one row per run.
        x: a column's name.
        y: a column's name.
        label: the curve's name in the legend.
        number: the curve's number, which sets colour and marker.
    """
    color = f"C{number}"
    estimates = runs.groupby(x)[y].apply(lambda values: t_interval(values.to_numpy()))
    where = estimates.index.to_numpy()
    mean, low, high = np.array(estimates.tolist()).T
    ax.plot(where, mean, marker=marker_of(number), color=color, label=label, markersize=3)
    if np.isfinite(low).all():  # a single seed has no interval
        ax.fill_between(where, low, high, color=color, alpha=0.2, linewidth=0)


def loss_rate_axis(ax: Axes, rates: pd.Series) -> None:
    """Make the x axis logarithmic, with 0 at its left end.

    Rates are labelled in per cent where labels do not overlap: first powers of ten, then others from the largest.
    """
    values = sorted(rates.unique())
    named = [0.0]
    for value in sorted(values, key=lambda rate: (not f"{rate:e}".startswith("1.000000e"), -rate)):
        if all(max(value, other) > NAMED_APART * min(value, other) for other in named):
            named.append(value)
    smallest = min((value for value in values if value > 0), default=0.01)
    ax.set_xscale("symlog", linthresh=smallest, linscale=0.6)
    ax.set_xlim(-0.1 * smallest, 1.4 * max(values))
    ax.xaxis.set_major_locator(FixedLocator(values))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}" if value in named else ""))
    ax.tick_params(axis="x", labelsize=6)


def label_ends(ax: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write each line's name in its colour right of the panel, at the height of its last point.

    Args:
        ax: the panel, with its final limits.
        ends: height, name and colour of each line.
    """
    low, high = ax.get_ylim()
    gap = LABEL_GAP * (high - low)
    free = -np.inf
    for y, name, color in sorted(ends):
        free = max(y, free + gap * (1 + name.count("\n")))
        ax.annotate(
            name, (1.03, free), xycoords=("axes fraction", "data"), color=color, fontsize=6, va="center",
            annotation_clip=False,
        )  # fmt: skip
