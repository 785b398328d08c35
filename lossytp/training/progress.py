"""Show a run's progress: a bar in a terminal, otherwise a line now and then."""

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from lossytp.parallel.group import rank_and_world_size

SECONDS_BETWEEN_LINES = SECONDS_OF_SILENCE = 5.0


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on stderr what the block does, every `SECONDS_OF_SILENCE` while it lasts. One process speaks for all."""
    began, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(SECONDS_OF_SILENCE):
            tqdm.write(f"{what}: {time.monotonic() - began:.0f} s so far", file=sys.stderr)

    if rank_and_world_size()[0] == 0:
        threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def details(numbers: Mapping[str, float], position: Mapping[str, int]) -> str:
    """Return the text after the loss in a line of progress, from the logs' numbers; "" if the data has no position."""
    if not position:
        return ""
    line = f"{numbers['train/tokens']:,} tokens, {numbers['train/tokens_per_second']:,.0f} tokens/s"
    positions = [f"{name} {number}" for name, number in position.items()]
    return ", ".join([line, f"learning rate {numbers['train/learning_rate']:.2e}", *positions])


class Progress:
    """Show steps, the training loss and evaluations on stderr, if `shown`: one process shows the progress of all.

    The run called `name` makes `steps` steps in all, of which `done` were made before it was resumed.
    """

    def __init__(self, steps: int, *, name: str = "training", done: int = 0, shown: bool = True) -> None:
        self._name, self._steps, self._shown = name, steps, shown
        self._last_line = time.monotonic()
        bar = shown and sys.stderr.isatty()
        self._bar = tqdm(total=steps, initial=done, desc=name, unit="step") if bar else None
        if done:
            self._write(f"{name}: resumed after step {done} of {steps}")

    def show(self, step: int, loss: float, more: str = "") -> None:
        """Show that `step`, counted from 1, is done, with its training loss and the text `more`."""
        line = f"loss {loss:.3f}{more and f', {more}'}"
        if self._bar is not None:
            self._bar.set_postfix_str(line, refresh=False)
            self._bar.update()
        elif time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._write(f"{self._name}: step {step} of {self._steps}, {line}")

    def evaluated(self, step: int, point: Mapping[str, Any], sample: str = "") -> None:
        """Show the scores of an evaluation, and a text that the model wrote. The entry point shows the last scores."""
        names = [name for name in point if name.endswith(("_lossy", "_clean")) and "spread" not in name]
        scores = [f"{name} {point[name]:.4f}" for name in names if point[name] is not None]
        if step < self._steps:
            self._write(f"evaluation: step {step} of {self._steps}, {', '.join(scores)}")
        if sample:
            self._write(f"sample: {sample!r}")

    def close(self) -> None:
        """Leave the bar as it is, so that later lines follow it."""
        if self._bar is not None:
            self._bar.close()

    def _write(self, line: str) -> None:
        if self._shown:
            tqdm.write(line, file=sys.stderr)
