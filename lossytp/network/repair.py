"""What is done about missing contributions to a sum."""

from dataclasses import dataclass
from typing import Protocol

from lossytp.network.checks import check_known


class Repair(Protocol):
    """A repair scales what arrives; what is lost counts as zero. It sends no extra bytes and takes no extra time."""

    def weight(self, loss_rate: float) -> float:
        """Factor for what has crossed a link of this stationary loss rate."""
        ...


@dataclass(frozen=True)
class Zero:
    """Leave missing elements at zero: the sum shrinks towards zero by the loss rate, on average."""

    def weight(self, loss_rate: float) -> float:
        return 1.0


@dataclass(frozen=True)
class Rescale:
    """Divide what crossed a link by its delivery probability, so that the sum is unbiased (Horvitz and Thompson,
    "A generalization of sampling without replacement", JASA 1952, eq. 6). An owner's own part crosses no link."""

    def weight(self, loss_rate: float) -> float:
        return 1.0 if loss_rate == 1 else 1 / (1 - loss_rate)  # a link that delivers nothing has nothing to scale


REPAIRS: dict[str, Repair] = {"zero": Zero(), "rescale": Rescale()}


def repair_named(name: str) -> Repair:
    """The repair of this name; ValueError lists the names when there is none."""
    check_known("repair", name, REPAIRS)
    return REPAIRS[name]
