"""Share what the paper's questions need: runs, comparisons, claims and figures; and compile the paper.

Each question is a module with `answer(study)`, which draws the question's figures and returns its numbers. Its notebook
writes these with `Study.write`. `python -m paper.study paper/lossytp.typ OUTPUT.pdf --results results/paper` compiles a
text that reads them.

Falls are in points or shares of accuracy, rises in nats a token. Shapes: S seeds, C comparisons.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from scipy import stats

from lossytp.network.checks import check_known
from lossytp.study.grid import Experiment, load_experiment
from lossytp.study.statistics import CONFIDENCE, t_interval
from lossytp.study.style import save
from lossytp.study.tables import LOSSLESS, read_experiment, run_name
from lossytp.training.command_line import Parser, read_yaml, run_as_command
from lossytp.training.config import RunSettings, settings_class
from lossytp.training.files import write_atomically

POINTS = 100  # in a share of 1
TASK_NAMES = {"sst2_held_out": "SST-2", "sst2": "SST-2", "qnli": "QNLI", "mnli": "MNLI subset"}
NAMED_APART = 4  # the least ratio of two labelled rates whose labels do not overlap
LABEL_GAP = 0.09  # of a panel's height, between two labels
FEWEST_SEEDS = 3  # an interval of two says nothing
HEADLINE = "01_tolerance"
PRETRAINED = ("11_pretraining", "11_pretraining_masked", "18_pretraining_gpt2", "18_pretraining_gpt2_jumbo")
NOT_COMPARED = (*PRETRAINED, "08_robustness", "12_predictions", "15_sizes")  # without an accuracy of their own
TRAINING = ("task", "model_name", "max_steps", "learning_rate")  # runs that share these are one training
MARGIN = 0.03  # of accuracy: a training learns its task if it beats the most frequent class by more


@dataclass(frozen=True)
class Study:
    """A profile's experiments, read when they are asked for.

    Attributes:
        profile: the name of the profile.
        results: the folder of the records.
        grids: the folder of the experiments.
        output: the folder of answers and figures.
        figures: what `draw` has drawn.
    """

    profile: str
    results: Path
    grids: Path
    output: Path
    figures: dict[str, Figure] = field(default_factory=dict)
    _read: dict[str, tuple[Experiment, pd.DataFrame, list[dict]]] = field(default_factory=dict)

    @cached_property
    def experiments(self) -> list[str]:
        """Return the names of the profile's experiments."""
        files = sorted(self.grids.glob("*.yaml"))
        return [each.stem for each in files if self.profile in read_yaml(each.read_text(encoding="utf-8"))["profiles"]]

    def runs(self, name: str) -> tuple[Experiment, pd.DataFrame, list[dict]]:
        """Return an experiment of the profile, the table of its finished runs, and their records."""
        if name not in self._read:
            experiment = load_experiment(self.grids / f"{name}.yaml", self.profile, self.results)
            self._read[name] = (experiment, *read_experiment(experiment))
        return self._read[name]

    def complete(self, name: str, seeds: int | None = None) -> tuple[pd.DataFrame, list[dict]]:
        """Return the runs and records of an experiment's complete seeds; none if the profile lacks it.

        An experiment has at least `seeds` of them: 1 for the headline, and else `FEWEST_SEEDS`, if it is left out.
        """
        if name not in self.experiments:
            return pd.DataFrame(), []
        experiment, table, records = self.runs(name)
        fewest = seeds or (1 if name == HEADLINE else FEWEST_SEEDS)
        return complete_seeds(experiment, table, records, unlearned_trainings(table), fewest)

    def arms_with_seeds(self, name: str) -> pd.DataFrame:
        """Return the runs of an experiment's arms that have enough seeds."""
        _, runs, _ = self.runs(name)
        if runs.empty:
            return runs
        seeds = runs.groupby(["arm", "loss_rate"])["seed"].transform("nunique")
        return runs[seeds >= FEWEST_SEEDS].reset_index(drop=True)

    def compared(self, name: str) -> pd.DataFrame:
        """Return an experiment's arms, compared with the lossless arm and the reference; none without seeds."""
        table, _ = self.complete(name)
        reference = None if table.empty or name == HEADLINE else self.runs(name)[0].reference
        return table if table.empty else falls_and_gains(table, reference=reference)

    def draw(self, figure: Figure, name: str) -> None:
        """Save a figure, and keep it for the notebook."""
        save(figure, self.output / "figures", name)
        plt.close(figure)  # a notebook shows it where it wants
        self.figures[name] = figure

    def write(self, question: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Write and return the answer to a question. In the paper's profile, `claims` says which claims hold.

        Raises:
            ValueError: if a claim cannot be checked.
        """
        if self.profile == "paper":
            answer["claims"] = check_claims(question, answer)
        folder = self.output / "answers"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{question}.json", json.dumps(answer, indent=1, allow_nan=False) + "\n")
        return answer


# Summarise all runs: the notebook 50_runs.


def summarise(study: Study) -> dict[str, Any]:
    """Write experiment_summary.csv and answers/comparisons.csv, and return what the runs themselves are.

    Raises:
        ValueError: if no cell has its record.
    """
    names = study.experiments
    tables = [table.assign(experiment=name) for name in names if len(table := study.runs(name)[1])]
    if not tables:  # an empty table's columns would turn whole numbers into floats
        raise ValueError(f"no cell has its record in {study.results}: run ./run_all.sh {study.profile} first")
    records = [record for name in names for record in study.runs(name)[2]]
    summary = pd.concat(tables).reset_index(drop=True).join(speed_and_traffic(records))
    (study.output / "answers").mkdir(parents=True, exist_ok=True)
    write_atomically(study.output / "experiment_summary.csv", summary.to_csv(index=False))
    compared = [(name, study.compared(name)) for name in names if name not in NOT_COMPARED]
    rows = [
        table.assign(experiment=name, fall=-table["difference"], low=-table["high"], high=-table["low"])
        for name, table in compared
        if len(table)
    ]
    columns = ["experiment", *TRAINING, "arm", "loss_rate", "seeds", "fall", "low", "high", "p_holm"]
    columns += ["gain", "gain_low", "gain_high", "gain_p_holm"]
    falls = pd.concat(rows).reindex(columns=columns) if rows else pd.DataFrame(columns=columns)
    write_atomically(study.output / "answers" / "comparisons.csv", falls.to_csv(index=False, float_format="%.6g"))
    return summarise_runs(records)


def summarise_runs(records: list[dict]) -> dict[str, Any]:
    """Summarise the distinct runs: number, packets and core hours.

    Controls send no packets, so theirs do not count.
    """
    records = list({json.dumps([record["config"], record["processes"]]): record for record in records}.values())
    with_packets = [record["network"]["training"] for record in records if not record["config"]["control"]]
    return {
        "cells": len(records),
        "packets": sum(traffic["packets"] for traffic in with_packets),
        "hours": sum(record["timing"]["total_seconds"] * record["processes"] for record in records) / 3600,
    }


def speed_and_traffic(records: list[dict[str, Any]]) -> pd.DataFrame:
    """Tabulate what `experiment_summary.csv` adds to `tidy`, one row per record.

    Columns that begin with `machine` hold for the machine of the run. `steps_to_target` counts steps to the run's
    `target_accuracy`, and `steps_to_0.7` those to its task's own target of 0.7. By direction and by operation follow
    packets, packets lost, calls, and calls that lost something, such as `backward_packets` and `all_gather_lossy`.
    """
    rows = []
    for record in records:
        timing, traffic = record["timing"], record["network"]["training"]
        reached = {"target": record["time_to_accuracy"]}
        reached |= {f"{each['target']:g}": each for each in record.get("times_to_targets", ())}
        machine = {name: timing[name] for name in ("step_seconds", "tokens_per_second")} | record["environment"]
        machine = {name: machine.get(name) for name in ("processor", "gpu", "step_seconds", "tokens_per_second")}
        machine["seconds_to"] = {name: each and each["seconds"] for name, each in reached.items()}
        row = {"machine": machine, "steps_to": {name: each and each["step"] for name, each in reached.items()}}
        for grouping in ("by_direction", "by_operation"):
            messages, only = traffic["messages"], len(traffic[grouping]) == 1
            for name, counts in traffic[grouping].items():
                calls = messages.get(grouping, {name: messages} if only else {}).get(name, {})  # old records lack some
                four = {**counts, **calls}
                row[name] = {each: four.get(each) for each in ("packets", "lost", "called", "lossy")}
        rows.append(row)
    return pd.json_normalize(rows, sep="_").convert_dtypes()  # whole numbers stay whole where some are missing


# Compare an experiment's arms, paired by seed.


def complete_seeds(
    experiment: Experiment, table: pd.DataFrame, records: list[dict], unlearned: pd.DataFrame, min_seeds: int = 1
) -> tuple[pd.DataFrame, list[dict]]:
    """Keep the runs of those tasks and seeds that have every arm, so that all arms share seeds.

    An arm with fewer than `min_seeds` runs of a task is left out, and limits no other arm. Every other arm limits all
    arms to its seeds. A training is left out if it lacks the lossless arm, or has no other arm.

    Args:
        experiment: the cells that a complete seed has.
        table: from `read_experiment`.
        records: from `read_experiment`.
        unlearned: from `unlearned_trainings`. Its trainings are neither required nor kept.
        min_seeds: arms with fewer runs of a task are dropped, and tasks with fewer complete seeds.

    Returns:
        The rows kept, and their records.
    """
    if table.empty:
        return table, []
    without = set(unlearned[list(TRAINING)].itertuples(index=False, name=None))
    arms = {
        run_name(cell.config): (*training, cell.arm, cell.config.network.process_rate)
        for cell in experiment.cells
        if (training := _training(cell.config)) not in without
    }
    finished = Counter(arms[run] for run in table["run"] if run in arms)
    enough = {arm for arm in arms.values() if finished[arm] >= min_seeds}
    compared: dict[bool, set[tuple]] = {True: set(), False: set()}  # trainings that have the lossless arm, and another
    for *its_training, arm, _ in enough:
        compared[arm == LOSSLESS].add(tuple(its_training))
    wanted = {run for run, arm in arms.items() if arm in enough and arm[:-2] in compared[True] & compared[False]}
    configs = [cell.config for cell in experiment.cells if run_name(cell.config) in wanted]
    required = Counter((config.task, config.network.seed) for config in configs)
    table = table[table["run"].isin(wanted)]
    keys = list(zip(table["task"], table["seed"], strict=True))
    complete = {key for key, count in Counter(keys).items() if count == required[key]}
    seeds = Counter(task for task, _ in complete)
    kept = table[np.array([key in complete and seeds[key[0]] >= min_seeds for key in keys], dtype=bool)]
    return kept.reset_index(drop=True), [records[number] for number in kept.index]


def _training(config: RunSettings) -> tuple:
    """Return a cell's values of the columns `TRAINING`."""
    return config.task, config.model_name, config.steps, config.optimizer.learning_rate


def unlearned_trainings(table: pd.DataFrame) -> pd.DataFrame:
    """Return the trainings that do not learn their task even without losses: they show nothing about losses.

    Such a training's mean lossless accuracy is at most `MARGIN` above the most frequent class's share. A training
    without a lossless run may still learn, and is not listed.

    Args:
        table: from `read_experiment`.

    Returns:
        One row per training, with the columns `TRAINING`.
    """
    if table.empty:
        return pd.DataFrame(columns=list(TRAINING))
    runs = table[table["arm"] == LOSSLESS]
    beyond = (runs["accuracy_lossy"] - runs["majority_share"]).rename("learned")
    learned = beyond.groupby([runs[name] for name in TRAINING]).mean()
    return learned[learned <= MARGIN].index.to_frame(index=False)


def loss_rate_of(record: Mapping[str, Any]) -> float:
    """Return the stationary loss rate of a run's process. The setting `loss_rate` lacks that of a preset or a trace."""
    return settings_class(record["config"]).from_dict(record["config"]).network.process_rate


def json_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the table's rows for JSON, with null for missing and infinite values."""
    values = table.replace([math.inf, -math.inf], math.nan).astype(object).to_dict("records")
    return [{str(name): None if pd.isna(value) else value for name, value in row.items()} for row in values]


def compare_arms(
    table: pd.DataFrame, *, reference: str, outcome: str = "accuracy_lossy", within: Sequence[str] = TRAINING
) -> pd.DataFrame:
    """Compute each arm's mean outcome and its difference from the reference arm, paired by seed.

    Args:
        table: one row per run: `arm`, `loss_rate`, `seed` and the outcome, as `read_experiment` returns it.
        reference: the arm to compare with. It has one loss rate in each training. Arms of a training without it get no
            difference.
        outcome: the column to compare.
        within: columns that runs must share to be compared.

    Returns:
        One row for each training, arm and loss rate: the columns of `within`, `arm`, `loss_rate`, `seeds` (pairs),
        `mean`, `mean_low`, `mean_high`, `difference`, `low`, `high` (Student's 95 % interval over the pairs), `p`
        (Student's paired test) and `p_holm` (corrected over all rows). The reference has no difference, a single pair
        has no p.

    Raises:
        ValueError: if the reference is unknown or has several loss rates, or an arm has two runs of a seed.
    """
    check_known("reference", reference, sorted(table["arm"].unique()))
    rows = []
    for training, runs in table.groupby(list(within), sort=False):
        base = runs[runs["arm"] == reference].set_index("seed")[outcome]
        if not base.index.is_unique:
            raise ValueError(f"reference = {reference!r} has several loss rates: name an arm with one")
        for (arm, rate), ours in runs.groupby(["arm", "loss_rate"], sort=False):
            if ours["seed"].duplicated().any():
                raise ValueError(f"arm {arm!r} has a seed twice at rate {rate:g}: add what differs to `within`")
            own = t_interval(ours[outcome].to_numpy())
            row = dict(zip(within, training, strict=True)) | {"arm": arm, "loss_rate": rate, "seeds": len(ours)}
            row |= {"mean": own.value, "mean_low": own.low, "mean_high": own.high}
            pairs = (ours.set_index("seed")[outcome] - base).dropna().to_numpy()
            if arm != reference and len(pairs):
                between = t_interval(pairs)
                row |= {"seeds": len(pairs), "difference": between.value, "low": between.low, "high": between.high}
                row["p"] = paired_p(pairs)
            rows.append(row)
    result = pd.DataFrame(rows)
    if "p" not in result:
        return result
    tested = result["p"].dropna()
    return result.assign(p_holm=pd.Series(holm(tested.to_numpy()), tested.index))


def holm(p_values: np.ndarray) -> np.ndarray:
    """Adjust (C,) p-values for testing several comparisons at once; they are at most 1.

    If those below 5 % count as shown, at most 5 % of studies make any false claim. Holm, "A simple sequentially
    rejective multiple test procedure", Scandinavian Journal of Statistics 1979.
    """
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(factors * np.asarray(p_values, dtype=float)[order]))
    return adjusted


def paired_p(pairs: np.ndarray) -> float:
    """Return the p-value of Student's test that (S,) differences are 0 on average.

    It is NaN for a single pair, and for equal differences other than 0: ties of counts show no variance.
    """
    if len(pairs) < 2 or (np.ptp(pairs) == 0 and pairs[0] != 0):
        return float("nan")
    if np.ptp(pairs) == 0:
        return 1.0
    return float(stats.ttest_1samp(pairs, 0.0).pvalue)


def falls_and_gains(table: pd.DataFrame, *, reference: str | None) -> pd.DataFrame:
    """Compare every arm with the lossless arm, and with the reference arm if there is one.

    Args:
        table: from `read_experiment`.
        reference: the arm that gains are measured from.

    Returns:
        The columns of `compare_arms`, for accuracy evaluated with losses. If there is a reference, also `gain` with
        `gain_low`, `gain_high` and `gain_p_holm`: the arm's change against the lossless run of its seed, less the
        reference's, over all trainings of the task.
    """
    found = compare_arms(table, reference=LOSSLESS)
    if reference is None:
        return found
    key = [*TRAINING, "seed"]
    lossless = table[table["arm"] == LOSSLESS].set_index(key)["accuracy_lossy"].rename("without")
    lossy = table[table["arm"] != LOSSLESS].join(lossless, on=key)
    changes = lossy.assign(change=lossy["accuracy_lossy"] - lossy["without"])
    gains = compare_arms(changes, reference=reference, outcome="change", within=("task",))
    return join_differences(found, gains, ["task", "arm", "loss_rate"], "gain")


def join_differences(table: pd.DataFrame, compared: pd.DataFrame, where: list[str], name: str) -> pd.DataFrame:
    """Add the differences of `compared` to `table`, matched on the columns `where` and prefixed with `name`."""
    names = {"difference": name} | {each: f"{name}_{each}" for each in ("low", "high", "p_holm")}
    return table.merge(compared.reindex(columns=[*where, *names]).rename(columns=names), on=where, how="left")


# Check claims: sentences of the paper, each with the condition on its question's answer under which it is true.


Results = dict[str, Any]


class Claim(NamedTuple):
    """Whether a claim's sentence is true, and the numbers that decide."""

    holds: bool
    numbers: dict[str, float]


CLAIMS: dict[str, Callable[[Results], Claim]] = {}
"""All claims by name, of the questions that are imported."""


def claim(condition: Callable[[Results], Claim]) -> Callable[[Results], Claim]:
    """Register a function as the claim of its name: `#claim("name")[sentence]` in the paper's text."""
    CLAIMS[condition.__name__] = condition
    return condition


def check_claims(question: str, answer: Results) -> dict[str, dict[str, Any]]:
    """Return, for each claim of a question, whether it `holds` and its `numbers`, with null for infinity."""
    checked = {}
    for name, condition in CLAIMS.items():
        if condition.__module__ != f"paper.{question}":
            continue
        try:
            holds, numbers = condition(answer)
        except (LookupError, StopIteration, ArithmeticError, TypeError, ValueError) as error:
            raise ValueError(
                f"the claim {name} cannot be checked ({error!r}): its results are missing or have another form; run "
                "the experiment that it needs"
            ) from error
        finite = {each: number if math.isfinite(number) else None for each, number in numbers.items()}
        checked[name] = {"holds": holds, "numbers": finite}
    return checked


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


def shown(p: float | None) -> bool:
    """Return whether a corrected p-value shows a difference; null stands for a test that was not possible."""
    return p is not None and p < 1 - CONFIDENCE


# Draw.


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


# Compile a text.


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
    parser = Parser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    typeset(arguments.source, arguments.output, arguments.results)


if __name__ == "__main__":
    run_as_command(main)
