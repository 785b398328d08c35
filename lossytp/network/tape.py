"""Recorded losses, for collectives that gradient checkpointing runs a second time."""

from typing import Any


class LossTape:
    """The losses of a stretch of forward pass: recorded the first time it runs, replayed each time after.

    A recomputation may stop early, so every replay starts from the beginning (`LossyNetwork.recording`).
    """

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._cursor = 0
        self.replaying = False

    def record(self, what: object) -> None:
        """What a message lacked, or what a repair put in."""
        self._messages.append(what)

    def next(self) -> Any:
        """What was recorded at this place."""
        self._cursor += 1
        return self._messages[self._cursor - 1]

    def rewind(self) -> None:
        """Replay from the first collective on."""
        self._cursor = 0
        self.replaying = True
