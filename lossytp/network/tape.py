"""Recorded losses, for collectives that gradient checkpointing runs a second time."""

from lossytp.network.routes import Missing


class LossTape:
    """The losses of a stretch of forward pass: recorded the first time it runs, replayed each time after.

    A recomputation may stop early, so every replay starts from the beginning (`LossyNetwork.recording`).
    """

    def __init__(self) -> None:
        self._messages: list[Missing] = []
        self._cursor = 0
        self.replaying = False

    def record(self, missing: Missing) -> None:
        self._messages.append(missing)

    def next(self) -> Missing:
        missing = self._messages[self._cursor]
        self._cursor += 1
        return missing

    def rewind(self) -> None:
        """Replay from the first collective on."""
        self._cursor = 0
        self.replaying = True
