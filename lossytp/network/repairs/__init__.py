"""Every repair, by the name that a flag or a YAML file gives it.

A new repair is one file with a `Repair`, and one line in `REPAIRS`. A repair that puts something other than zero in
place of what is missing also says how, with `lossytp.parallel.missing.fills`.
"""

from lossytp.network.notation import build
from lossytp.network.repairs.fec import Fec
from lossytp.network.repairs.hadamard import Hadamard
from lossytp.network.repairs.local import Local
from lossytp.network.repairs.repair import ZERO, Repair, Zero
from lossytp.network.repairs.rescale import Rescale, RescaleCounted
from lossytp.network.repairs.retransmit import Retransmit
from lossytp.network.repairs.stale import Stale

__all__ = [
    "REPAIRS",
    "ZERO",
    "Fec",
    "Hadamard",
    "Local",
    "Repair",
    "Rescale",
    "RescaleCounted",
    "Retransmit",
    "Stale",
    "Zero",
    "repair_named",
]

REPAIRS: dict[str, type[Repair]] = {
    kind.name: kind for kind in (Zero, Rescale, RescaleCounted, Stale, Local, Fec, Hadamard, Retransmit)
}


def repair_named(text: str) -> Repair:
    """Return the repair that `text` names, such as ``zero``, ``fec(10, 8, depth=4)`` or ``retransmit(2)``.

    Raises:
        ValueError: the name is unknown, or a value does not fit the repair.
    """
    return build("repair", text, REPAIRS)
