"""Hold a profile's experiments with their finished records, and compare their arms."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lossytp.study.comparisons import drops_and_gains, unlearned_trainings
from lossytp.study.figures.style import save
from lossytp.study.grid import Experiment, load_experiments
from lossytp.study.records import TRAINING, complete_seeds, read_experiment
from lossytp.study.run_measures import mean_by_arm, traffic_costs
from lossytp.training.config import TrainConfig

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
