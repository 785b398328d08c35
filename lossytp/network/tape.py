"""Recorded losses, for collectives that gradient checkpointing runs a second time."""

from lossytp.network.routes import LostSpans


class LossTape:
    """The losses of a stretch of forward pass: recorded the first time it runs, replayed each time after.

    A recomputation may stop early, so every replay starts from the beginning (`LossyNetwork.recording`).
    """

    def __init__(self) -> None:
        self._spans: list[LostSpans] = []
        self._cursor = 0
        self.replaying = False

    def record(self, spans: LostSpans) -> None:
        self._spans.append(spans)

    def next(self) -> LostSpans:
        spans = self._spans[self._cursor]
        self._cursor += 1
        return spans

    def rewind(self) -> None:
        """Replay from the first collective on."""
        self._cursor = 0
        self.replaying = True
