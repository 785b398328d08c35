"""Where losses may fall (layers, modules, phases, links), and counters of what was sent and lost there."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import add
from typing import Any, NamedTuple

from lossytp.network.checks import check_known, refuse_if
from lossytp.network.routes import Link, checked_link


class Site(NamedTuple):
    """The place in a model that a message comes from.

    `module` is "attention" or "mlp". `phase` is "reduce" for contributions on their way to a sum, and "gather" for a
    result on its way to the ranks. `layer` and `module` are None for PyTorch's own parallelisms, which do not know
    them.
    """

    layer: int | None
    module: str | None
    direction: str | None  # "forward" or "backward"
    operation: str = "all_reduce"
    phase: str = "reduce"


NOWHERE = Site(None, None, None)
DIRECTIONS = ("forward", "backward")
MODULES = ("attention", "mlp")
PHASES = ("reduce", "gather")
PURPOSES = ("training", "evaluation")
COUNTED = ("packets", "lost", "extra", "missing")
Row = tuple[Any, ...]  # purpose, site, group, and src and dst for packets


class Counters:
    """Running totals for each (purpose, site, group, link); purpose is "training" or "evaluation".

    `packets` counts packets on the wire, and `extra` those among them that a repair added. `missing` counts the
    messages' own packets that no repair delivered in the end.
    """

    def __init__(self) -> None:
        self._packets: dict[Row, list[int]] = {}  # in the order of COUNTED
        self._messages: dict[Row, list[int]] = {}  # messages, and those that lost something

    def add(self, row: Row, *counts: int) -> None:
        """Count packets that entered a link, (purpose, site, group, src, dst), in the order of `COUNTED`."""
        _add(self._packets, row, counts)

    def add_message(self, row: Row, lossy: bool) -> None:
        """Count a collective call or a message, (purpose, site, group), and whether it lost anything."""
        _add(self._messages, row, (1, int(lossy)))

    def rows(self, purpose: str | None = None) -> list[dict]:
        """Return the rows of a table as dicts, those of one purpose or all."""
        return [
            {"purpose": of, **(site or NOWHERE)._asdict(), "group": group, "src": src, "dst": dst}
            | dict(zip(COUNTED, counts, strict=True))
            for (of, site, group, src, dst), counts in self._packets.items()
            if purpose in (None, of)
        ]

    def summary(self, purpose: str) -> dict:
        """Return the totals of one purpose, whole and grouped, with observed loss rates.

        Messages are grouped by direction and by operation. If several groups have a link of the same name, the group's
        name precedes it.

        Raises:
            ValueError: if the purpose is neither "training" nor "evaluation".
        """
        check_known("purpose", purpose, PURPOSES)
        rows = self.rows(purpose)
        groups = Counter((src, dst) for _, src, dst in {(row["group"], row["src"], row["dst"]) for row in rows})
        for row in rows:
            row["link"] = f"{row['src']}->{row['dst']}"
            if groups[row["src"], row["dst"]] > 1:
                row["link"] = f"{row['group']}: {row['link']}"
        messages = [
            (site or NOWHERE)._asdict() | {"called": called, "lossy": lossy}
            for (of, site, _), (called, lossy) in self._messages.items()
            if of == purpose
        ]
        return {
            **_total(rows),
            **_grouped(rows, ("direction", "operation", "phase", "module", "layer", "link"), _total),
            "messages": _called(messages) | _grouped(messages, ("direction", "operation"), _called),
        }

    def _tables(self) -> dict[str, dict[Row, list[int]]]:
        return {"packets": self._packets, "messages": self._messages}

    def state_dict(self) -> dict[str, list]:
        """Return all totals as JSON-ready values."""
        return {name: [[*row, *counts] for row, counts in table.items()] for name, table in self._tables().items()}

    def load_state_dict(self, state: dict[str, list]) -> None:
        """Replace all totals with those of `state_dict()`."""
        self._packets, self._messages = (
            {(row[0], Site(*row[1]) if row[1] else None, *row[2:width]): row[width:] for row in state[name]}
            for name, width in (("packets", 5), ("messages", 3))
        )

    def merge(self, other: "Counters") -> None:
        """Take over the rows that another process counted. A row that both have is one traffic, seen from two sides.

        Raises:
            ValueError: if the two disagree on a row, so the processes have diverged.
        """
        for name, mine in self._tables().items():
            for row, counts in other._tables()[name].items():
                if mine.setdefault(row, list(counts)) != counts:
                    what = f"processes disagree on the traffic of {row}: {mine[row]} and {counts}"
                    raise ValueError(f"{what}; give all the same seed, loss process and packet size")

    def add_all(self, earlier: "Counters") -> None:
        """Add what was counted before, on the same rows or on others."""
        for name, mine in self._tables().items():
            for row, counts in earlier._tables()[name].items():
                _add(mine, row, counts)


def _add(table: dict[Row, list[int]], row: Row, counts: Sequence[int]) -> None:
    totals = table.get(row)
    table[row] = list(counts) if totals is None else list(map(add, totals, counts))


def _total(rows: list[dict]) -> dict:
    totals = {name: sum(row[name] for row in rows) for name in COUNTED}
    return {**totals, "observed_loss_rate": totals["lost"] / totals["packets"] if totals["packets"] else None}


def _called(messages: list[dict]) -> dict:
    return {name: sum(message[name] for message in messages) for name in ("called", "lossy")}


def _grouped(rows: list[dict], names: Iterable[str], total: Callable[[list[dict]], dict]) -> dict:
    """Return the totals of the rows with each value of each name, as ``by_name``."""
    grouped: dict = {}
    for name in names:
        groups: dict[str, list[dict]] = {}
        for row in rows:
            groups.setdefault(str(row[name]), []).append(row)
        grouped[f"by_{name}"] = {value: total(members) for value, members in groups.items()}
    return grouped


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The messages that may lose packets. All others are reliable, and not counted. None means no restriction.

    Args:
        direction: "forward" or "backward".
        module: "attention" or "mlp".
        layers: first transformer layer and the layer after the last, counted from 0.
        phase: "reduce" (contributions on their way to a sum) or "gather" (the sum on its way to the ranks).
        positions: first position and the position after the last, counted from 0 within each sequence, or a slice with
            both. Packets that hold no such token are reliable, and not counted. Padding has no position.

    Messages that belong to no layer, such as data-parallel gradients, lie outside every range of layers and positions,
    and outside every module. To restrict links, name them, `LossyNetwork({(0, 1): process})`, or give `LossyNetwork`
    its `ranks_per_node`.
    """

    direction: str | None = None
    module: str | None = None
    layers: tuple[int, int] | None = None
    phase: str | None = None
    positions: tuple[int, int] | slice | None = None

    def __post_init__(self) -> None:
        for name, known in (("direction", DIRECTIONS), ("module", MODULES), ("phase", PHASES)):
            check_known(name, getattr(self, name), (None, *known))
        if isinstance(each := self.positions, slice) and each.step in (None, 1):
            object.__setattr__(self, "positions", (each.start or 0, each.stop))
        for name in ("layers", "positions"):
            given: Any = getattr(self, name)
            ends = tuple(given) if isinstance(given, tuple | list) else ()
            if given is None:
                continue
            fault = "is not a range: give the first one and the one after the last, such as (0, 2), or 0:2 as a flag"
            whole = len(ends) == 2 and all(isinstance(end, Integral) for end in ends)
            refuse_if(not whole or not 0 <= ends[0] < ends[1], name, given, fault)
            object.__setattr__(self, name, ends)

    def covers(self, site: Site | None) -> bool:
        """Return whether a message of this site may lose packets."""
        site = site or NOWHERE
        if self.layers is not None and (site.layer is None or not self.layers[0] <= site.layer < self.layers[1]):
            return False
        if self.positions is not None and site.layer is None:
            return False
        pairs = ((self.direction, site.direction), (self.module, site.module), (self.phase, site.phase))
        return all(wanted in (None, own) for wanted, own in pairs)


EVERYWHERE = Scope()


def links_named(text: str) -> list[Link]:
    """Return the directed links of a text such as ``0>1,2>-1``.

    Raises:
        ValueError: if the text has another form, names a link twice, or names an impossible link.
    """
    matches = [re.fullmatch(r"\s*(-1|\d+)\s*>\s*(-1|\d+)\s*", link) for link in text.split(",")]
    links = [checked_link((int(match[1]), int(match[2]))) for match in matches if match]
    if len(links) < len(matches) or len(set(links)) < len(links):
        raise ValueError(f"lossy_links = {text!r} is not understood: name each link once, such as 0>1,2>3")
    return links


def range_named(name: str, text: str | None) -> tuple[int, int] | None:
    """Return the first number and the one after the last of a text such as ``0:2``, the value of the flag `name`.

    Raises:
        ValueError: if the text has another form.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if not match:
        raise ValueError(f"{name} = {text!r} is not understood: write first:stop, such as 0:2 (in YAML in quotes)")
    return int(match[1]), int(match[2])


class LossTape:
    """Record the losses of a part of the forward pass on its first run, and replay them on every later run.

    Gradient checkpointing runs this part again. A recomputation may stop early, so every replay starts at the beginning
    (`LossyNetwork.recording`).
    """

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._cursor = 0
        self.replaying = False

    def record(self, what: object) -> None:
        """Record what a message lacked, or what a repair filled in."""
        self._messages.append(what)

    def next(self) -> Any:
        """Return the next recorded item."""
        self._cursor += 1
        return self._messages[self._cursor - 1]

    def rewind(self) -> None:
        """Start a replay at the first collective."""
        self._cursor = 0
        self.replaying = True
