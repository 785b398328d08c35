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

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from lossytp.network.checks import check_known, refuse_if
from lossytp.training.command_line import Parser, read_yaml, run_as_command
from lossytp.training.config import RunSettings, settings_class
from lossytp.training.settings import Count, CountFromZero, Settings

OTHER_KEYS = ("seed", "output_dir", "dataset")  # arms cannot set these: seeds and tasks have their own keys
STARTS_PROCESSES = "lossytp.study.torchrun"  # a notebook imports it if its cells run in several processes
PlainPath = Annotated[str, Field(pattern=r"^\w[\w.-]*(/\w[\w.-]*)*$")]  # shell and Snakemake read it unchanged


class Grid(Settings):
    """The form of a grid."""

    notebook: PlainPath
    processes: Count = 1
    outputs: list[PlainPath] = Field([])
    reference: str | None = None
    profiles: dict[str, dict[str, Any]]


class Profile(Settings):
    """The form of one profile of a grid."""

    cells_per_notebook: Count | None = None
    seeds: Count
    first_seed: CountFromZero = 0
    tasks: list[str] | None = None
    base: dict[str, Any]
    arms: list[dict[str, Any]]


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
    """Load a folder's experiments that have a profile, in the order of their names."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ValueError(f"{folder} has no grid (a .yaml file): give a folder that has one")
    grids = {file: _content(file).profiles for file in files}
    having = [file for file in files if profile in grids[file]]
    if not having:
        known = sorted({name for profiles in grids.values() for name in profiles})
        raise ValueError(f"profile = {profile!r} is in no grid of {folder}: choose one of {', '.join(known)}")
    return [load_experiment(file, profile, results) for file in having]


def load_experiment(file: Path, profile: str, results: Path) -> Experiment:
    """Load the experiment of a YAML file.

    Args:
        file: the grid.
        profile: one of the grid's profiles.
        results: the folder below which cells write.
    """
    grid, folder = _content(file), file.parents[1]
    with _errors_name(file):
        check_known("profile", profile, grid.profiles)
        settings = Profile.from_dict(grid.profiles[profile])
        if bool(grid.outputs) == bool(settings.cells_per_notebook):
            raise ValueError("cells_per_notebook and outputs, which are of all cells, exclude each other: give one")
        for name in OTHER_KEYS:
            refuse_if(name in settings.base, f"base: {name}", settings.base.get(name), "is the grid's: leave it out")
        _check_notebook(folder / f"{grid.notebook}.ipynb", grid.processes)
        tasks, arms = _tasks(folder / "tasks.yaml", settings.tasks), _arms(settings.arms)
        cells = [
            _cell(arm, {**task, **settings.base, **values, "seed": seed}, results / "runs", grid.processes)
            for seed in range(settings.first_seed, settings.first_seed + settings.seeds)
            for task in tasks
            for arm, values in arms
        ]
        if not cells:
            raise ValueError("arms or tasks is empty: give at least one of each")
        seen: set[str] = set()
        for cell in cells:
            if cell.config.output.output_dir in seen:
                raise ValueError(f"arm {cell.arm!r} repeats an earlier cell: leave one out")
            seen.add(cell.config.output.output_dir)
        if grid.reference is not None:
            check_known("reference", grid.reference, list(dict.fromkeys(cell.arm for cell in cells)))
    together = settings.cells_per_notebook or len(cells)
    outputs = tuple(str(results / name) for name in grid.outputs)
    return Experiment(file.stem, grid.notebook, tuple(cells), together, grid.processes, outputs, grid.reference)


def _content(file: Path) -> Grid:
    with _errors_name(file):
        return Grid.from_dict(read_yaml(file.read_text(encoding="utf-8")))


@contextmanager
def _errors_name(file: Path) -> Iterator[None]:
    """Turn errors in a grid into a ValueError of one line that begins with the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{file}: {error.filename} cannot be read ({error.strerror}): put a file there") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from error


def _check_notebook(file: Path, processes: int) -> None:
    refuse_if(not file.is_file(), "notebook", file.stem, f"is not in {file.parent}: give one that is")
    alone = processes > 1 and STARTS_PROCESSES not in file.read_text(encoding="utf-8")
    fault = f"does not suit {file.stem}: leave it out, or give a notebook that imports {STARTS_PROCESSES}"
    refuse_if(alone, "processes", processes, fault)


def _tasks(file: Path, names: list[str] | None) -> list[dict[str, Any]]:
    """Return the settings of each named task."""
    if names is None:
        return [{}]
    known = read_yaml(file.read_text(encoding="utf-8")) or {}
    for name in names:
        check_known("task", name, known)
    return [known[name] for name in names]


def _arms(arms: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the arm's name and the values of every cell."""
    found = []
    for arm in arms:
        lists = {name: values for name, values in arm.items() if name != "arm"}
        if not isinstance(arm.get("arm"), str):
            raise ValueError(f"arm {arm} has no name: give it as the text of arm")
        for name, values in lists.items():
            wrong = not isinstance(values, list) or not values or name in OTHER_KEYS
            refuse_if(wrong, name, values, f"is no list of values: give one, and leave out {', '.join(OTHER_KEYS)}")
        found += [(arm["arm"], dict(zip(lists, each, strict=True))) for each in itertools.product(*lists.values())]
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
    ranks = config.num_ranks
    fault = f"does not match a cell of {ranks} ranks: give {ranks}, or leave it out"
    refuse_if(processes not in (1, ranks), "processes", processes, fault)
    return Cell(_arm_name(arm, config), config)


def _arm_name(arm: str, config: RunSettings) -> str:
    """Return the arm's name, with the cell's values where braces name parameters."""
    try:
        return arm.format_map(config.as_dict() | {"loss_rate": config.network.process_rate})
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        fault = f"cannot be filled in ({type(error).__name__}: {error})"
        raise ValueError(f"arm {arm!r} {fault}: name parameters, as {{loss_rate:g}}; double other braces") from error


def main() -> None:
    """Check the grids as the command line says."""
    parser = Parser(description="Check every grid of a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("profile")
    arguments = parser.parse_args()
    load_experiments(arguments.folder, arguments.profile, Path("results"))


if __name__ == "__main__":
    run_as_command(main)
