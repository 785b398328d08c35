"""Log curves to watch while a run trains: a file of JSON lines, TensorBoard, and Weights & Biases."""

import importlib.util
import json
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lossytp.training.config import RunSettings
from lossytp.training.files import refuse, saving, write_atomically

STATISTICS = "statistics.jsonl"
Key = tuple[int, str]  # a line's step, and what its names begin with: "train" or "eval"


class StatisticsFile:
    """Append lines of JSON to a file, each with its `step`, at once, so a killed run leaves whole lines.

    A resumed run repeats none: lines after `done`, the step that it resumes from, are dropped, and lines that are there
    already are not written again.

    Raises:
        ValueError: if the file cannot be written, or this program did not write it.
    """

    def __init__(self, path: Path, *, done: int = 0) -> None:
        kept = {key: line for key, line in written_lines(path).items() if key[0] <= done}
        self._path, self._kept = path, set(kept)
        write_atomically(path, "".join(f"{line}\n" for line in kept.values()))
        with saving(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line, unless it is there."""
        if values and _key(step, values) not in self._kept:
            with saving(self._path):
                print(json.dumps({"step": step, **values}, allow_nan=False), file=self._file, flush=True)

    def close(self) -> None:
        """Close the file."""
        with saving(self._path):
            self._file.close()


def written_lines(path: Path) -> dict[Key, str]:
    """Return the whole lines of the file, by key; raise ValueError if it has lines that this program did not write."""
    found: dict[Key, str] = {}
    try:
        *lines, _ = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        for line in lines:  # a full disk may have cut the last one
            values = json.loads(line)
            found[_key(values.pop("step"), values)] = line
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        refuse([path])
    return found


def _key(step: int, values: Mapping[str, Any]) -> Key:
    return step, min(values).split("/")[0]


WANDB_ID = "wandb_id"  # file in output_dir with the run's id, so that a resumed run continues its curves


def check_installed(config: RunSettings) -> None:
    """Raise ModuleNotFoundError, in one line, if a library to log to is not installed."""
    for name in ("tensorboard", "wandb"):
        if getattr(config.output, name) and importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"{name} = True needs {name}, which is not installed: pip install {name}")


def check_logs(config: RunSettings) -> None:
    """Raise ValueError if the user's own file is where statistics will be written; the first process calls this."""
    if config.output.statistics:
        written_lines(Path(config.output.output_dir) / STATISTICS)


class Logs:
    """Write numbers and texts to the logs that the configuration asks for, if `shown`: one process writes for all.

    What a killed run logged after step `done` is replaced.
    """

    def __init__(self, config: RunSettings, *, done: int = 0, shown: bool = True) -> None:
        folder, asked = Path(config.output.output_dir), config.output
        self._folder = folder / "tensorboard"
        self._board: Any = None
        self._wandb: Any = None
        self._statistics = StatisticsFile(folder / STATISTICS, done=done) if asked.statistics and shown else None
        if asked.tensorboard and shown:
            from torch.utils.tensorboard import SummaryWriter

            with saving(self._folder):
                self._board = SummaryWriter(str(self._folder), purge_step=done + 1)
        if asked.wandb and shown:
            import wandb

            name = folder / WANDB_ID
            if not name.exists() or done == 0:
                write_atomically(name, uuid.uuid4().hex)
            same = {"project": "lossytp", "id": name.read_text(encoding="utf-8"), "resume": "allow"}
            self._wandb = wandb.init(**same, dir=folder, config=config.as_dict())
            self._wandb.define_metric("*", step_metric="step")  # W&B's own counter does not accept a step twice

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write numbers and texts by name, such as "train/loss"; skip other values, and numbers that are not finite."""
        numbers = {
            name: value for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
        }
        texts = {name: value for name, value in values.items() if isinstance(value, str) and value}
        if self._statistics is not None:
            self._statistics.write(step, numbers | texts)
        if self._board is not None:
            with saving(self._folder):
                for name, number in numbers.items():
                    self._board.add_scalar(name, number, step)
                for name, text in texts.items():
                    self._board.add_text(name, text, step)
        if self._wandb is not None:
            self._wandb.log({"step": step, **numbers})

    def close(self) -> None:
        """Write what is pending, and close the logs."""
        with saving(self._folder):
            for log in filter(None, (self._statistics, self._board)):
                log.close()
        if self._wandb is not None:
            self._wandb.finish()
