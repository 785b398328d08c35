"""How far a run is: a bar in a terminal, a line now and then elsewhere."""

import sys
import time

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 20.0


class Progress:
    """Shows steps and the training loss on stderr; nothing unless `shown`, so that one process speaks for all."""

    def __init__(self, steps: int, *, shown: bool = True) -> None:
        self._steps = steps
        self._shown = shown
        self._last_line = time.monotonic()
        self._bar = tqdm(total=steps, desc="training", unit="step") if shown and sys.stderr.isatty() else None

    def show(self, step: int, loss: float) -> None:
        """After each step, counted from 1."""
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            self._bar.update()
            if step == self._steps:
                self._bar.close()
        elif self._shown and time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"training: step {step} of {self._steps}, loss {loss:.3f}", file=sys.stderr, flush=True)
