"""Record losses, and replay them for collectives that gradient checkpointing runs again."""

from typing import Any


class LossTape:
    """Record the losses of a part of the forward pass on its first run, and replay them on every later run.

    A recomputation may stop early, so every replay starts at the beginning (`LossyNetwork.recording`).
    """

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._cursor = 0
        self.replaying = False

    def record(self, what: object) -> None:
        """Record what a message lacked, or what a repair filled in."""
        self._messages.append(what)

    def next(self) -> Any:
        """Return the next recorded item."""
        self._cursor += 1
        return self._messages[self._cursor - 1]

    def rewind(self) -> None:
        """Start a replay at the first collective."""
        self._cursor = 0
        self.replaying = True
