"""The random streams of a network's links: those of training, and fresh ones for each evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from operator import index
from typing import Any

import numpy as np

from lossytp.network.checks import check_number
from lossytp.network.link_processes import LinkProcesses
from lossytp.network.loss_process import LinkLosses
from lossytp.network.routes import Hop
from lossytp.network.streams import Normals

TRAINING: tuple[str, int] = ("training", 0)
LinkOfGroup = tuple[str, int, int]  # group, src, dst


class LinkStreams:
    """Draw each link's losses and normal numbers from streams of its own.

    A link's stream begins when the link is first used. Training's streams go on from message to message. Each
    evaluation has streams that its step names.

    Args:
        processes: the links' loss processes.
        seed: the network's.
    """

    def __init__(self, processes: LinkProcesses, seed: int) -> None:
        self.processes, self.seed = processes, seed
        self.purpose = self.block = TRAINING
        self._evaluations = 0
        self._losses: dict[LinkOfGroup, LinkLosses] = {}
        self._normals: dict[LinkOfGroup, Normals] = {}
        self._of_training = self._losses, self._normals

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy holds: only training's streams, because nothing would end an evaluation in the copy."""
        losses, normals = self._of_training
        return self.__dict__ | {"purpose": TRAINING, "block": TRAINING, "_losses": losses, "_normals": normals}

    @property
    def of_training(self) -> bool:
        """Return whether the program is outside of all evaluations."""
        return self.purpose == TRAINING

    def take(self, group: str, src: int, dst: int, num_packets: int) -> np.ndarray:
        """Return which of the link's next `num_packets` packets are lost: sorted indices, int64 (num_lost,)."""
        losses = self._losses.get((group, src, dst))
        if losses is None:
            losses = self._losses[group, src, dst] = self._begun(self.purpose, (group, src, dst))
        return losses.take(num_packets)

    def _begun(self, purpose: tuple[str, int], link: LinkOfGroup) -> LinkLosses:
        return self.processes.of(*link[1:]).losses((self.seed, *purpose, *link))

    def normals(self, group: str, hop: Hop) -> np.ndarray:
        """Return a standard normal number for each element of the hop, float64 (elements,)."""
        link = (group, hop.src, hop.dst)
        if link not in self._normals:
            self._normals[link] = Normals((self.seed, *self.purpose, *link, "normals"))
        return self._normals[link].take(hop.stop - hop.start)

    @property
    def wraps(self) -> int | None:
        """Return the largest number of times that a link's trace has begun again; None if no link replays a trace."""
        found = [getattr(losses, "wraps", None) for losses in self._losses.values()]
        return max((wraps for wraps in found if wraps is not None), default=None)

    @contextmanager
    def evaluation(self, step: int) -> Iterator[None]:
        """Draw within the block from streams named by `step`, so that training's streams do not shift."""
        check_number("step", step, Integral, "the number of the training step")
        before = self.purpose, self.block, self._losses, self._normals
        self._evaluations += 1
        self.purpose, self.block = ("evaluation", index(step)), ("evaluation", self._evaluations)
        self._losses, self._normals = {}, {}
        try:
            yield
        finally:
            self.purpose, self.block, self._losses, self._normals = before

    def state_dict(self) -> dict[str, list]:
        """Return the positions of training's streams as JSON-ready values."""
        losses, normals = self._of_training
        return {
            "links": [[list(link), each.state_dict()] for link, each in losses.items()],
            "normals": [[list(link), each.position] for link, each in normals.items()],
        }

    def loaded(self, state: dict) -> "LinkStreams":
        """Return streams that go on from `state_dict()`."""
        again = LinkStreams(self.processes, self.seed)
        again._evaluations = self._evaluations  # so that a new evaluation never finds the memory of an earlier one
        for (group, src, dst), position in state["links"]:
            link = (group, src, dst)
            again._losses[link] = again._begun(TRAINING, link)
            again._losses[link].load_state_dict(position)
        for link, position in state["normals"]:
            again._normals[tuple(link)] = Normals((self.seed, *TRAINING, *link, "normals"), position)
        return again
