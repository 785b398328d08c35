"""Load experiments: a YAML grid, a notebook, and a cell for each configuration and seed.

    notebook: 20_cells
    processes: 2                   # of a cell; 1 by default
    outputs: [table.csv]           # files that the notebook makes from all cells, which then share one notebook run
    reference: single losses       # the lossy arm that figures compare the other lossy arms with
    profiles:
      laptop:
        cells_per_notebook: 3      # how many cells one notebook run computes
        seeds: 3
        first_seed: 5              # 0 by default; fresh seeds retest what earlier ones suggested
        tasks: [docstrings]        # with settings in ../tasks.yaml; the default task by default
        base: {max_steps: 250}     # settings that all cells share
        arms:                      # each is the product of its lists; `arm` is its name in tables and figures
          - {arm: no loss, loss_rate: [0.0]}
          - {arm: "bursts of {mean_burst_packets:g}", loss_type: [g-e], mean_burst_packets: [8], loss_rate: [0.01]}

`python -m lossytp.study.grid FOLDER PROFILE` checks every grid of a folder.

The name of a cell's folder ends with a hash of the settings that differ from the defaults. So a changed grid never
reuses an old record, a new parameter leaves old records in place, and experiments run a shared cell once. (If a default
changed after a record was written, starting its run again is an error.)
"""

import argparse
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lossytp.network.checks import check_at_least, check_known
from lossytp.training.command_line import read_yaml, run_as_command
from lossytp.training.config import RunSettings, settings_class

KEYS = {"notebook", "processes", "outputs", "reference", "profiles"}
PROFILE_KEYS = {"cells_per_notebook", "seeds", "first_seed", "tasks", "base", "arms"}
OTHER_KEYS = ("seed", "output_dir", "dataset")  # arms cannot set these: seeds and tasks have their own keys
PLAIN_PATH = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")  # shell and Snakemake read it unchanged
STARTS_PROCESSES = "lossytp.study.torchrun"  # a notebook imports it if its cells run in several processes
Kind = TypeVar("Kind")


class Cell(NamedTuple):
    """One configuration with one seed, and its arm in the experiment."""

    arm: str
    config: RunSettings


@dataclass(frozen=True)
class Experiment:
    """An experiment's cells: all arms of one seed, then all of the next."""

    name: str
    notebook: str
    cells: tuple[Cell, ...]
    cells_per_notebook: int
    processes: int = 1
    outputs: tuple[str, ...] = ()
    reference: str | None = None

    def batches(self, elsewhere: frozenset[str] = frozenset()) -> list[tuple[RunSettings, ...]]:
        """Return the configurations of each notebook run, without cells whose folder is in `elsewhere`."""
        configs = [cell.config for cell in self.cells if self.outputs or cell.config.output.output_dir not in elsewhere]
        size = self.cells_per_notebook
        return [tuple(configs[start : start + size]) for start in range(0, len(configs), size)]

    @property
    def folders(self) -> frozenset[str]:
        """Return the cells' output folders."""
        return frozenset(cell.config.output.output_dir for cell in self.cells)


def load_experiments(folder: Path, profile: str, results: Path) -> list[Experiment]:
    """Load a folder's experiments that have a profile, in the order of their names.

    Raises:
        ValueError: if there is none, or a grid is wrong.
    """
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ValueError(f"{folder} has no grid (a .yaml file): give a folder that has one")
    having = [file for file in files if profile in _content(file)["profiles"]]
    if not having:
        known = sorted({name for file in files for name in _content(file)["profiles"]})
        raise ValueError(f"profile = {profile!r} is in no grid of {folder}: choose one of {', '.join(known)}")
    return [load_experiment(file, profile, results) for file in having]


def load_experiment(file: Path, profile: str, results: Path) -> Experiment:
    """Load the experiment of a YAML file.

    Args:
        file: the grid.
        profile: one of the grid's profiles.
        results: the folder below which cells write.

    Raises:
        ValueError: if a key, parameter or value is unknown; it names the file.
    """
    content = _content(file)
    with _errors_name(file):
        check_known("profile", profile, content["profiles"])
        settings = _of(dict, "profile", content["profiles"][profile])
        for key in settings:
            check_known("key", key, sorted(PROFILE_KEYS))
        named = [_of(str, "an output", name) for name in _of(list, "outputs", content.get("outputs", []))]
        for name in named:
            _check_plain("output", name)
        outputs = tuple(str(results / name) for name in named)
        counts = {"seeds": settings["seeds"], "processes": content.get("processes", 1)}
        if not outputs:
            counts["cells_per_notebook"] = settings["cells_per_notebook"]
        elif "cells_per_notebook" in settings:
            raise ValueError("cells_per_notebook does not apply to outputs, which are made of all cells: leave one out")
        for key, value in counts.items():
            check_at_least(key, value, 1)
        base = _of(dict, "base", settings["base"])
        for name in OTHER_KEYS:
            if name in base:
                raise ValueError(f"base sets {name}, which the grid sets for each cell: leave it out")
        first_seed = settings.get("first_seed", 0)
        check_at_least("first_seed", first_seed, 0)
        notebook = _notebook(file.parents[1], content["notebook"], counts["processes"])
        place = results / "runs"
        tasks = _tasks(file.parents[1] / "tasks.yaml", settings.get("tasks"))
        arms = _arms(settings["arms"])
        cells = [
            _cell(arm, {**task, **base, **values, "seed": seed}, place, counts["processes"])
            for seed in range(first_seed, first_seed + settings["seeds"])
            for task in tasks
            for arm, values in arms
        ]
        for cell in cells:
            _check_processes(cell.config, counts["processes"])
        if not cells:
            raise ValueError("arms or tasks is empty: give at least one of each")
        folders = [cell.config.output.output_dir for cell in cells]
        if len(set(folders)) < len(folders):
            name = next(
                cell.arm for number, cell in enumerate(cells) if cell.config.output.output_dir in folders[:number]
            )
            raise ValueError(f"arm {name!r} repeats an earlier cell: leave one out")
        reference = content.get("reference")
        if reference is not None:
            check_known("reference", reference, list(dict.fromkeys(cell.arm for cell in cells)))
    together = counts.get("cells_per_notebook", len(cells))
    return Experiment(file.stem, notebook, tuple(cells), together, counts["processes"], outputs, reference)


def _content(file: Path) -> dict[str, Any]:
    with _errors_name(file):
        content = _of(dict, "the grid", read_yaml(file.read_text(encoding="utf-8")))
        for key in content:
            check_known("key", key, sorted(KEYS))
        for profile in _of(dict, "profiles", content["profiles"]):
            _of(str, "a profile's name", profile)
        return content


def _of(kind: type[Kind], name: str, value: object) -> Kind:
    """Return the value if it has the right type, such as a mapping; raise ValueError if not."""
    if not isinstance(value, kind):
        raise ValueError(
            f"{name} = {value!r} is not a {kind.__name__}: see lossytp/study/grid.py for the form of a grid"
        )
    return value


@contextmanager
def _errors_name(file: Path) -> Iterator[None]:
    """Turn errors in a grid into a ValueError of one line that begins with the file."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{file}: key {error} is missing: see lossytp/study/grid.py for the form of a grid") from error
    except OSError as error:
        raise ValueError(f"{file}: {error.filename} cannot be read ({error.strerror}): put a file there") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from error


def _check_plain(name: str, path: str) -> None:
    if not PLAIN_PATH.fullmatch(path):
        raise ValueError(
            f"{name} {path!r} could confuse the shell or Snakemake, or lead out of the results: write letters, digits, "
            "_, - and . only, and / between folders"
        )


def _notebook(folder: Path, name: str, processes: int) -> str:
    """Return the notebook's name; raise ValueError if it is not in the folder, or cannot start the processes."""
    _check_plain("notebook", _of(str, "notebook", name))
    file = folder / f"{name}.ipynb"
    if not file.is_file():
        raise ValueError(f"notebook = {name!r} is not in {folder}: give one that is")
    if processes > 1 and STARTS_PROCESSES not in file.read_text(encoding="utf-8"):
        raise ValueError(
            f"processes = {processes} does not suit notebook = {name!r}, whose cells run in one process: leave "
            f"processes out, or give a notebook that imports {STARTS_PROCESSES}"
        )
    return name


def _tasks(file: Path, names: list[str] | None) -> list[dict[str, Any]]:
    """Return the settings of each named task."""
    if names is None:
        return [{}]
    known = _of(dict, file.name, read_yaml(file.read_text(encoding="utf-8")))
    for name in _of(list, "tasks", names):
        check_known("task", name, known)
    return [known[name] for name in names]


def _arms(arms: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the arm's name and the values of every cell."""
    found = []
    for arm in _of(list, "arms", arms):
        _of(str, "an arm's name", _of(dict, "an arm", arm)["arm"])
        lists = {name: values for name, values in arm.items() if name != "arm"}
        for name, values in lists.items():
            if not isinstance(values, list) or not values or name in OTHER_KEYS:
                raise ValueError(
                    f"arm {name} = {values!r} is not allowed: give a list of values, and leave "
                    f"out {', '.join(OTHER_KEYS)}"
                )
        for values in itertools.product(*lists.values()):
            found.append((arm["arm"], dict(zip(lists, values, strict=True))))
    return found


def _cell(arm: str, values: dict[str, Any], place: Path, processes: int) -> Cell:
    kind = settings_class(values)
    config = kind.from_dict({**values, "output_dir": kind.defaults()["output_dir"]})
    changed = {name: value for name, value in config.changes().items() if name not in ("task_folder", "threads")}
    changed |= {"processes": processes} if processes > 1 else {}
    digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:10]
    process = re.sub(r"[^\w.-]+", "-", config.network.loss_type).strip("-")  # it may contain a path
    task = re.sub(r"[^\w.-]+", "-", config.task).strip("-")
    name = f"{task}_{process}_{config.network.loss_rate:g}_seed{config.network.seed}_{digest}"
    config = config.replace(output_dir=str(place / name))
    return Cell(_arm_name(arm, config), config)


def _arm_name(arm: str, config: RunSettings) -> str:
    """Return the arm's name, with the cell's values where braces name parameters."""
    try:
        return arm.format_map(config.as_dict() | {"loss_rate": config.network.process_rate})
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"arm {arm!r} cannot be filled in ({type(error).__name__}: {error}): name parameters, such as "
            "{loss_rate:g}, and double each literal brace"
        ) from error


def _check_processes(config: RunSettings, processes: int) -> None:
    ranks = (
        config.network.tensor_parallel_size
        * config.parallelism.data_parallel_size
        * config.parallelism.pipeline_parallel_size
    )
    if processes not in (1, ranks):
        raise ValueError(
            f"processes = {processes} does not match a cell of {ranks} ranks: give {ranks}, or leave it out"
        )


def main() -> None:
    """Check the grids as the command line says."""
    parser = argparse.ArgumentParser(description="Check every grid of a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("profile")
    arguments = parser.parse_args()
    load_experiments(arguments.folder, arguments.profile, Path("results"))


if __name__ == "__main__":
    run_as_command(main)
