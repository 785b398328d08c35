"""Say in words what a tolerance measurement means: the rates that a model bears, and the cheapest repair that holds."""

from collections.abc import Sequence

from lossytp.study.statistics import share_interval
from lossytp.tolerance.config import NO_REPAIR
from lossytp.tolerance.measure import HARMLESS, Row

LARGE = 0.1  # nats a token


def advice(rows: Sequence[Row]) -> list[str]:
    """Return sentences about the rows. The model bears a rate if the rise's whole interval is below the bound.

    A few blocks cannot show that collapses are rare. Where a repair holds, or none is needed, and no block collapsed,
    the sentence bounds the share of blocks that may collapse.
    """
    lines = []
    for network in dict.fromkeys(row.setup[:2] for row in rows):
        mine = [row for row in rows if row.setup[:2] == network]
        where = f"{network[0]}, losses in {'the reduce phase' if network[1] == 'reduce' else 'both phases'}"
        lines += [f"{where}: {_borne(mine, bound)}" for bound in (HARMLESS, LARGE)]
        for rate in dict.fromkeys(row.setup.loss_rate for row in mine):
            lines.append(f"{where}, {rate:.3g}: {_cheapest([row for row in mine if row.setup.loss_rate == rate])}")
    return lines


def _borne(rows: Sequence[Row], bound: float) -> str:
    """Return the largest rate up to which no rate costs `bound` nats without a repair."""
    borne = None
    for row in sorted((row for row in rows if row.setup.repair == NO_REPAIR), key=lambda row: row.setup.loss_rate):
        if row.rise.high >= bound:
            break
        borne = row.setup.loss_rate
    if borne is None:
        return f"no measured loss rate costs under {bound} nats without a repair"
    return f"up to a loss rate of {borne:.3g}, losses cost under {bound} nats without a repair"


def _cheapest(rows: Sequence[Row]) -> str:
    """Return the repair with the fewest packets among those that keep the rise under `LARGE`."""
    holds = [row for row in rows if row.rise.high < LARGE]
    if not holds:
        best = min(rows, key=lambda row: row.rise.value)
        return (
            f"no measured repair holds the rise under {LARGE} nats; {_name(best)} comes closest ({best.rise.value:.3g})"
        )
    bare = next(row for row in rows if row.setup.repair == NO_REPAIR)
    if bare in holds:
        return f"no repair is needed ({bare.rise.value:.3g} nats){_unseen(bare)}"
    cheapest = min(holds, key=lambda row: (row.packets, row.rise.value))
    more = cheapest.packets / bare.packets - 1
    return f"{_name(cheapest)} holds ({cheapest.rise.value:.3g} nats, with {more:.1%} more packets){_unseen(cheapest)}"


def _unseen(row: Row) -> str:
    """Return a bound on the share of blocks that may collapse, if none did."""
    blocks = sum(map(len, row.rises))
    if row.collapsed:
        return ""
    return f"; none of {blocks} blocks collapsed, but up to {share_interval(0, blocks).high:.0%} of blocks may"


def _name(row: Row) -> str:
    return "leaving lost packets out" if row.setup.repair == NO_REPAIR else row.setup.repair
