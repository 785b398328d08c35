"""Record losses, for collectives that gradient checkpointing runs a second time."""

from typing import Any


class LossTape:
    """Record the losses of a stretch of forward pass the first time it runs; replay them each time after.

    A recomputation may stop early, so every replay starts from the beginning (`LossyNetwork.recording`).
    """

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._cursor = 0
        self.replaying = False

    def record(self, what: object) -> None:
        """Record what a message lacked, or what a repair put in."""
        self._messages.append(what)

    def next(self) -> Any:
        """Return what was recorded at this place."""
        self._cursor += 1
        return self._messages[self._cursor - 1]

    def rewind(self) -> None:
        """Replay from the first collective on."""
        self._cursor = 0
        self.replaying = True
