"""All repairs, by the names that flags and YAML files use.

To add a repair, add a file with a `Repair`, and its name to `REPAIRS`. A repair that replaces missing elements with
something other than zero also registers a function with `lossytp.parallel.missing.fills`. Repairs of different stages
can be joined: ``protect(0.01) + hadamard(64)``.
"""

from lossytp.network.checks import check_is
from lossytp.network.notation import build, split_outside_parentheses
from lossytp.network.repairs.chain import Chain
from lossytp.network.repairs.fec import Fec
from lossytp.network.repairs.hadamard import Hadamard
from lossytp.network.repairs.local import Local
from lossytp.network.repairs.protect import Protect
from lossytp.network.repairs.repair import ZERO, Repair, Zero
from lossytp.network.repairs.rescale import Rescale, RescaleCounted
from lossytp.network.repairs.retransmit import Retransmit
from lossytp.network.repairs.stale import Stale

__all__ = [
    "REPAIRS",
    "ZERO",
    "Chain",
    "Fec",
    "Hadamard",
    "Local",
    "Protect",
    "Repair",
    "Rescale",
    "RescaleCounted",
    "Retransmit",
    "Stale",
    "Zero",
    "repair_named",
]

REPAIRS: dict[str, type[Repair]] = {
    kind.name: kind for kind in (Zero, Rescale, RescaleCounted, Stale, Local, Fec, Hadamard, Retransmit, Protect)
}


def repair_named(text: str) -> Repair:
    """Return the repair that `text` names, such as ``fec(10, 8, depth=4)`` or ``protect(0.01) + hadamard(64)``.

    Raises:
        ValueError: if a name is unknown, a value does not fit its repair, or the repairs cannot be joined.
    """
    check_is("repair", text, str, "a name, or name(1, option=2)")
    parts = split_outside_parentheses(text, "+")
    if len(parts) > 1 and "" in parts:
        raise ValueError(
            f"repair = {text!r} lacks a name before or after +: write it like protect(0.01) + hadamard(64)"
        )
    repairs = tuple(build("repair", part, REPAIRS) for part in parts)
    return repairs[0] if len(repairs) == 1 else Chain(repairs)
