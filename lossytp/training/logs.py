"""Log curves to watch while a run trains: a file of JSON lines, TensorBoard, and Weights & Biases."""

import importlib.util
import math
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lossytp.training.config import RunSettings
from lossytp.training.files import saving, write_atomically
from lossytp.training.statistics_file import STATISTICS, StatisticsFile, written_lines

WANDB_ID = "wandb_id"  # file in output_dir with the run's id, so that a resumed run continues its curves


def check_installed(config: RunSettings) -> None:
    """Raise ModuleNotFoundError, in one line, if a library to log to is not installed."""
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) and importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"{name} = True needs {name}, which is not installed: pip install {name}")


def check_logs(config: RunSettings) -> None:
    """Raise ValueError if the user's own file is where statistics will be written; the first process calls this."""
    if config.statistics:
        written_lines(Path(config.output_dir) / STATISTICS)


class Logs:
    """Write numbers and texts to the logs that the configuration asks for.

    Args:
        config: the run's configuration.
        done: the last step logged before; what a killed run logged after it is replaced.
        shown: whether to write anything. One process writes for all.
    """

    def __init__(self, config: RunSettings, *, done: int = 0, shown: bool = True) -> None:
        folder = Path(config.output_dir)
        self._folder = folder / "tensorboard"
        self._hook = threading.excepthook
        self._board: Any = None
        self._wandb: Any = None
        self._statistics: StatisticsFile | None = None
        if config.statistics and shown:
            self._statistics = StatisticsFile(folder / STATISTICS, done=done)
        if config.tensorboard and shown:
            from torch.utils.tensorboard import SummaryWriter

            self._hook, threading.excepthook = threading.excepthook, _silent_on_os_errors(threading.excepthook)
            with saving(self._folder):
                self._board = SummaryWriter(str(self._folder), purge_step=done + 1)
        if config.wandb and shown:
            import wandb

            name = folder / WANDB_ID
            if not name.exists() or done == 0:
                write_atomically(name, uuid.uuid4().hex)
            self._wandb = wandb.init(
                project="lossytp",
                id=name.read_text(encoding="utf-8"),
                resume="allow",
                dir=folder,
                config=config.as_dict(),
            )
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
        """Write what is pending, and close the logs.

        Raises:
            ValueError: if it cannot be written.
        """
        if self._statistics is not None:
            self._statistics.close()
        if self._board is not None:
            board, self._board = self._board, None
            try:
                with saving(self._folder):
                    board.close()
            finally:
                threading.excepthook = self._hook
        if self._wandb is not None:
            self._wandb.finish()


def _silent_on_os_errors(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `hook` without the tracebacks of TensorBoard's writing thread; `Logs` raises the same errors."""

    def silent(arguments: Any) -> None:
        if not issubclass(arguments.exc_type, OSError):
            hook(arguments)

    return silent
