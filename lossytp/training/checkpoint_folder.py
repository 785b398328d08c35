"""Find checkpoints on the disk: this run's own folder, the newest one, and whether it is whole.

A checkpoint is a folder `step-N` whose file `checkpoint.json` has the run's configuration and the checksums of all
other files.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lossytp.parallel.layout import Layout
from lossytp.training.config import RunSettings
from lossytp.training.files import crc32_of
from lossytp.training.own_files import run_of
from lossytp.training.weights_file import SUFFIXES

FOLDER, MARKER = "checkpoint", "checkpoint.json"
STEP = re.compile(r"step-(\d+)")
LAYOUT = (
    "tensor_parallel_size",
    "data_parallel_size",
    "data_parallel_type",
    "pipeline_parallel_size",
    "implementation",
    "enable_loss_parallelism",
    "deferred_init",
)
"""Settings that say how a run is spread over processes. They may change when it is resumed."""


SIZES = tuple(name for name in LAYOUT if name.endswith("_parallel_size"))


@dataclass(frozen=True)
class Found:
    """A whole checkpoint."""

    folder: Path
    step: int
    processes: int
    config: dict[str, Any]

    @property
    def layout(self) -> dict[str, Any]:
        """Return the layout that wrote it, by name."""
        return layout_of(self.processes, self.config)

    def place(self, rank: int) -> Layout:
        """Return the place that a process had."""
        sizes = {name: self.config[name] for name in SIZES}
        return Layout(**sizes, rank=rank, world_size=self.processes)


def run_name(config: RunSettings) -> str:
    """Return what tells this run from all others on the machine: the path of its output folder."""
    return os.path.abspath(config.output_dir)


def home(config: RunSettings) -> Path:
    """Return the folder of this run's checkpoints: `checkpoint_path` if it is new, or this run has made it."""
    own = Path(config.output_dir) / FOLDER
    if config.checkpoint_path is None:
        return own
    given = Path(config.checkpoint_path)
    if not given.is_dir():
        names_a_file = given.exists() or given.suffix in SUFFIXES
        return own if names_a_file or STEP.fullmatch(given.name) else given  # a mistyped step is no new folder
    if run_of(given) not in (None, run_name(config)):
        return own
    if all(path.name.startswith(".") for path in given.iterdir()):  # what a run leaves that is killed early
        return given
    steps = steps_in(given)
    if not steps:
        return own
    try:
        run = json.loads((steps[-1] / MARKER).read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return own
    return given if run == run_name(config) else own


def candidates(own: Path, given: str | None) -> list[Path]:
    """Return the folders of checkpoints to resume from, newest first.

    Args:
        own: the folder of the run's own checkpoints, which come first.
        given: the run's `checkpoint_path`, if any.

    Raises:
        ValueError: if `given` is not there, or holds neither a checkpoint nor weights.
    """
    mine = steps_in(own)[::-1]
    if given is None or Path(given) == own:
        return mine
    path = Path(given)
    if mine and own.resolve() not in path.resolve().parents:
        return mine  # the run has gone on since it resumed from `checkpoint_path`
    if not path.exists():
        raise ValueError(f"checkpoint_path = {given!r} does not exist: give one that does, or leave it out")
    if path.name == MARKER:
        return [path.parent]
    found = [file for file in path.rglob(MARKER) if STEP.fullmatch(file.parent.name)]
    if not found and not weights_in(path):
        raise ValueError(
            f"checkpoint_path = {given!r} has no {MARKER} below it, and is no .pth file: leave it out to start over"
        )
    if not found:
        return []
    newest = max(found, key=lambda file: file.stat().st_mtime).parent
    return [step for step in steps_in(newest.parent)[::-1] if number_of(step) <= number_of(newest)]


def read_marker(folder: Path) -> Found:
    """Return the checkpoint in a folder.

    Raises:
        ValueError: if it is damaged or cut short.
    """
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        config, sums = {**marker["config"]}, {**marker["files"]}
        found = Found(folder, int(marker["step"]), int(marker["processes"]), config)
        if found.processes < 1 or not all(found.config[size] >= 1 for size in SIZES):
            raise ValueError("it was written by no process")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{MARKER} cannot be read") from error
    for name, crc in sums.items():
        try:
            same = crc32_of(folder / name) == crc
        except OSError as error:
            raise ValueError(f"{name}: {error.strerror}") from error
        if not same:
            raise ValueError(f"the checksum of {name} does not match")
    return found


def first_weights(own: Path, given: str | None) -> Path | None:
    """Return the file of weights with which `checkpoint_path` begins a run; None if it names no such file.

    Args:
        own: the folder of the run's own checkpoints.
        given: the run's `checkpoint_path`, if any. A checkpoint there comes before a file of weights.
    """
    if given is None or Path(given) == own or Path(given).name == MARKER:
        return None
    checkpoints = (file for file in Path(given).rglob(MARKER) if STEP.fullmatch(file.parent.name))
    return None if any(True for _ in checkpoints) else weights_in(Path(given))


def weights_in(path: Path) -> Path | None:
    """Return the file of weights that this is, or the newest one in this folder."""
    files = [path] if path.is_file() else list(path.glob("*")) if path.is_dir() else []
    files = [file for file in files if file.suffix in SUFFIXES]
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def steps_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, in the order of their steps."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if STEP.fullmatch(path.name) and path.is_dir()), key=number_of)


def number_of(folder: Path) -> int:
    """Return the step of a checkpoint."""
    return int(folder.name.removeprefix("step-"))


def layout_of(processes: int, config: dict[str, Any]) -> dict[str, Any]:
    """Return the number of processes, and the settings of `LAYOUT`."""
    return {"processes": processes, **{name: config[name] for name in LAYOUT if name in config}}
