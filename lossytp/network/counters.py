"""Packets sent and lost, by where in the model, which way, and on which link."""

from typing import NamedTuple


class Site(NamedTuple):
    """Where a collective stands: a transformer layer, a module of it ("attention" or "mlp"), a direction."""

    layer: int
    module: str
    direction: str  # "forward" or "backward"


Row = tuple[str, Site | None, str, int, int]  # purpose, site, group, src, dst


class Counters:
    """Running totals for each (purpose, site, group, link); purpose is "training" or "evaluation"."""

    def __init__(self) -> None:
        self._totals: dict[Row, list[int]] = {}

    def add(self, row: Row, packets: int, lost: int) -> None:
        totals = self._totals.get(row)
        if totals is None:
            totals = self._totals[row] = [0, 0]
        totals[0] += packets
        totals[1] += lost

    def rows(self, purpose: str | None = None) -> list[dict]:
        """One dict a row, of one purpose or of all, for a table."""
        return [
            {
                "purpose": row_purpose,
                "layer": site.layer if site else None,
                "module": site.module if site else None,
                "direction": site.direction if site else None,
                "group": group,
                "src": src,
                "dst": dst,
                "packets": packets,
                "lost": lost,
            }
            for (row_purpose, site, group, src, dst), (packets, lost) in self._totals.items()
            if purpose in (None, row_purpose)
        ]

    def summary(self, purpose: str) -> dict:
        """Totals of one purpose: all together, and by direction, module, layer and link, with observed loss rates."""
        rows = self.rows(purpose)
        groupings = {
            "by_direction": lambda row: row["direction"],
            "by_module": lambda row: row["module"],
            "by_layer": lambda row: row["layer"],
            "by_link": lambda row: f"{row['src']}->{row['dst']}",
        }
        summary: dict = _total(rows)
        for name, label in groupings.items():
            labels = dict.fromkeys(str(label(row)) for row in rows)
            summary[name] = {value: _total([row for row in rows if str(label(row)) == value]) for value in labels}
        return summary

    def state_dict(self) -> list:
        return [
            [list(row[:1]), list(row[1]) if row[1] else None, list(row[2:]), *totals]
            for row, totals in self._totals.items()
        ]

    def load_state_dict(self, state: list) -> None:
        self._totals = {
            (purpose[0], Site(*site) if site else None, *link): [packets, lost]
            for purpose, site, link, packets, lost in state
        }


def _total(rows: list[dict]) -> dict:
    packets = sum(row["packets"] for row in rows)
    lost = sum(row["lost"] for row in rows)
    return {"packets": packets, "lost": lost, "observed_loss_rate": lost / packets if packets else None}
