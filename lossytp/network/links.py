"""Names of directed links: a pair (src, dst) of global ranks, where `SWITCH` stands for the switch."""

from collections.abc import Iterable
from numbers import Integral
from operator import index

from lossytp.network.checks import shown
from lossytp.network.routes import SWITCH

Link = tuple[int, int]  # src, dst


def checked_link(key: object) -> Link:
    """Return `key` as a pair of Python's integers.

    Raises:
        TypeError: if `key` is not a pair of whole numbers.
        ValueError: if an end is below `SWITCH`, or both are the same.
    """
    ends = key if isinstance(key, tuple) else ()
    if len(ends) != 2 or not all(isinstance(end, Integral) and not isinstance(end, bool) for end in ends):
        raise TypeError(f"link = {shown(key)} is not a pair of ranks: give (src, dst), such as (0, 1)")
    src, dst = index(ends[0]), index(ends[1])
    if min(src, dst) < SWITCH:
        raise ValueError(f"link = {key} names a rank below 0: give ranks from 0, or {SWITCH} for the switch")
    if src == dst:
        raise ValueError(f"link = {key} leads from {src} to itself: give two different ends")
    return src, dst


def check_links_within(links: Iterable[Link], num_ranks: int) -> None:
    """Raise ValueError if an end of a link is a rank above the last of `num_ranks` ranks."""
    for src, dst in links:
        if max(src, dst) >= num_ranks:
            raise ValueError(
                f"link {src}>{dst} names rank {max(src, dst)}, which is above {num_ranks - 1}, the last of "
                f"{num_ranks} ranks: name links among ranks 0 to {num_ranks - 1}"
            )
