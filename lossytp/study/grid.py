"""Experiments: a YAML grid, a notebook, and a cell for each configuration and seed.

    notebook: 20_accuracy_vs_loss
    processes: 2                   # that a cell starts, 1 when left out
    outputs: [table.csv]           # what the notebook makes of all its cells, which then are one notebook run
    profiles:
      laptop:
        cells_per_notebook: 3      # start-up is paid once a notebook run
        seeds: 3
        base: {max_steps: 250}     # what all cells share
        arms:                      # each arm is the product of its lists
          - {loss_rate: [0.0, 0.01]}
          - {loss_type: [g-e], mean_burst_packets: [8], loss_rate: [0.01]}

`python -m lossytp.study.grid FOLDER PROFILE` checks every grid of a folder. A cell's folder bears a hash of all that
its configuration changes from the defaults, so a changed grid never takes an old record for its own, and a new
parameter moves no record. (A record of other defaults is refused when its run is started again.)
"""

import dataclasses
import hashlib
import itertools
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lossytp.network.checks import check_known
from lossytp.training.command_line import run_as_command
from lossytp.training.config import TrainConfig

KEYS = {"notebook", "processes", "outputs", "profiles"}
PROFILE_KEYS = {"cells_per_notebook", "seeds", "base", "arms"}


@dataclass(frozen=True)
class Experiment:
    """Cells, all arms of one seed and then the next seed's, in batches of one notebook run each."""

    name: str
    notebook: str
    cells: tuple[TrainConfig, ...]
    cells_per_notebook: int
    processes: int = 1
    outputs: tuple[str, ...] = ()

    def batches(self) -> list[tuple[TrainConfig, ...]]:
        """The cells of one notebook run each."""
        size = self.cells_per_notebook
        return [self.cells[start : start + size] for start in range(0, len(self.cells), size)]


def load_experiment(file: Path, profile: str, results: Path) -> Experiment:
    """The experiment of a YAML file under one profile, its cells writing below `results`.

    ValueError, naming the file, for an unknown key, parameter or value.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        for key in content:
            check_known("key", key, sorted(KEYS))
        check_known("profile", profile, content["profiles"])
        settings = content["profiles"][profile]
        for key in settings:
            check_known("key", key, sorted(PROFILE_KEYS))
        outputs = tuple(str(results / name) for name in content.get("outputs", ()))
        counts = {"seeds": settings["seeds"], "processes": content.get("processes", 1)}
        if not outputs:
            counts["cells_per_notebook"] = settings["cells_per_notebook"]
        elif "cells_per_notebook" in settings:
            raise ValueError("cells_per_notebook beside outputs, which are made of all cells: leave one of them out")
        for key, value in counts.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{key} = {value!r} is not a positive whole number: give one, such as 3")
        notebook = content["notebook"]
        if not (file.parents[1] / f"{notebook}.ipynb").is_file():
            raise ValueError(f"notebook = {notebook!r} is not in {file.parents[1]}: give one that is")
        for arm in settings["arms"]:
            for name, values in arm.items():
                if not isinstance(values, list) or not values or name in ("seed", "output_dir"):
                    raise ValueError(f"arm {name} = {values!r}: give a list of values, of another name than seed")
        folder = results / "runs" / file.stem
        cells = [
            _cell({**settings["base"], **dict(zip(arm, values, strict=True)), "seed": seed}, folder)
            for seed in range(settings["seeds"])
            for arm in settings["arms"]
            for values in itertools.product(*arm.values())
        ]
        if not cells:
            raise ValueError("arms = [] makes no cells: give at least one arm")
    except KeyError as error:
        raise ValueError(f"{file}: key {error} is missing: see lossytp/study/grid.py for the form of a grid") from error
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from error
    together = counts.get("cells_per_notebook", len(cells))
    return Experiment(file.stem, notebook, tuple(cells), together, counts["processes"], outputs)


def _cell(values: dict[str, Any], folder: Path) -> TrainConfig:
    config = TrainConfig.from_dict({**values, "output_dir": TrainConfig.output_dir})
    digest = hashlib.sha256(json.dumps(config.changes(), sort_keys=True).encode()).hexdigest()[:10]
    process = re.sub(r"[^\w.-]+", "-", config.loss_type).strip("-")  # the text of one may hold a path
    name = f"{process}_{config.loss_rate:g}_seed{config.seed}_{digest}"
    return dataclasses.replace(config, output_dir=str(folder / name))


def main() -> None:
    folder, profile = sys.argv[1:]
    for file in sorted(Path(folder).glob("*.yaml")):
        load_experiment(file, profile, Path("results"))


if __name__ == "__main__":
    run_as_command(main)
