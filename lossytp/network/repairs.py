"""Every repair, by the name that a flag or a YAML file gives it."""

from lossytp.network.fec import Fec
from lossytp.network.notation import build
from lossytp.network.repair import Hadamard, Local, Repair, Rescale, RescaleCounted, Retransmit, Stale, Zero

REPAIRS: dict[str, type[Repair]] = {
    "zero": Zero,
    "rescale": Rescale,
    "rescale_counted": RescaleCounted,
    "stale": Stale,
    "local": Local,
    "fec": Fec,
    "hadamard": Hadamard,
    "retransmit": Retransmit,
}


def repair_named(text: str) -> Repair:
    """The repair that is named, such as ``zero``, ``fec(10, 8, depth=4)`` or ``retransmit(2)``.

    ValueError lists the names where there is none, and says what is wrong with its values.
    """
    return build("repair", text, REPAIRS)
