"""Where losses may fall (layers, modules, phases, links), and counters of what was sent and lost there."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lossytp.network.checks import check_at_least, check_is, check_known
from lossytp.network.routes import Link, checked_link

# Count packets sent and lost, and collectives that lost something, by place in the model, direction and link.


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
PURPOSES = ("training", "evaluation")
COUNTED = ("packets", "lost", "extra", "missing")
Row = tuple[str, Site | None, str, int, int]  # purpose, site, group, src, dst
Messages = tuple[str, Site | None, str]  # purpose, site, group


class Counters:
    """Running totals for each (purpose, site, group, link); purpose is "training" or "evaluation".

    `packets` counts packets on the wire, and `extra` those among them that a repair added. `missing` counts the
    messages' own packets that no repair delivered in the end.
    """

    def __init__(self) -> None:
        self._totals: dict[Row, list[int]] = {}  # in the order of COUNTED
        self._messages: dict[Messages, list[int]] = {}  # messages, those that lost something

    def add(self, row: Row, packets: int, lost: int, extra: int, missing: int) -> None:
        """Count packets that entered a link, and how many of them it lost. The class explains `extra` and `missing`."""
        _add(self._totals, row, (packets, lost, extra, missing))

    def add_message(self, key: Messages, lossy: bool) -> None:
        """Count one collective call of a group, or one message sent, and whether it lost anything."""
        _add(self._messages, key, (1, int(lossy)))

    def rows(self, purpose: str | None = None) -> list[dict]:
        """Return the rows of a table as dicts, those of one purpose or all."""
        return [
            {
                "purpose": row_purpose,
                **(site or NOWHERE)._asdict(),
                "group": group,
                "src": src,
                "dst": dst,
                **dict(zip(COUNTED, counts, strict=True)),
            }
            for (row_purpose, site, group, src, dst), counts in self._totals.items()
            if purpose in (None, row_purpose)
        ]

    def summary(self, purpose: str) -> dict:
        """Return the totals of one purpose, whole and grouped, with observed loss rates.

        Messages are grouped by direction and by operation.

        If several groups have a link of the same name, the group's name precedes it.

        Raises:
            ValueError: if the purpose is neither "training" nor "evaluation".
        """
        check_known("purpose", purpose, PURPOSES)
        rows = self.rows(purpose)
        groups = Counter((src, dst) for _, src, dst in {(row["group"], row["src"], row["dst"]) for row in rows})

        def link(row: dict) -> str:
            name = f"{row['src']}->{row['dst']}"
            return name if groups[row["src"], row["dst"]] == 1 else f"{row['group']}: {name}"

        groupings: dict[str, Callable[[dict], object]] = {
            "by_direction": lambda row: row["direction"],
            "by_operation": lambda row: row["operation"],
            "by_phase": lambda row: row["phase"],
            "by_module": lambda row: row["module"],
            "by_layer": lambda row: row["layer"],
            "by_link": link,
        }
        summary: dict = _total(rows)
        for name, label in groupings.items():
            labels = dict.fromkeys(str(label(row)) for row in rows)
            summary[name] = {value: _total([row for row in rows if str(label(row)) == value]) for value in labels}
        messages = [(site or NOWHERE, counts) for (of, site, _), counts in self._messages.items() if of == purpose]
        summary["messages"] = _called(counts for _, counts in messages)
        for name in ("direction", "operation"):
            summary["messages"][f"by_{name}"] = {
                value: _called(counts for site, counts in messages if str(getattr(site, name)) == value)
                for value in dict.fromkeys(str(getattr(site, name)) for site, _ in messages)
            }
        return summary

    def state_dict(self) -> dict[str, list]:
        """Return all totals as JSON-ready values."""
        return {
            "packets": [[purpose, site, *link, *counts] for (purpose, site, *link), counts in self._totals.items()],
            "messages": [[purpose, site, group, *counts] for (purpose, site, group), counts in self._messages.items()],
        }

    def load_state_dict(self, state: dict[str, list]) -> None:
        """Replace all totals with those of `state_dict()`."""
        self._totals = {
            (purpose, Site(*site) if site else None, group, src, dst): counts
            for purpose, site, group, src, dst, *counts in state["packets"]
        }
        self._messages = {
            (purpose, Site(*site) if site else None, group): [calls, lossy]
            for purpose, site, group, calls, lossy in state["messages"]
        }

    def merge(self, other: "Counters") -> None:
        """Add what another process counted. A row that both have is the same traffic, seen from two sides.

        Raises:
            ValueError: if the two disagree on a row, so the processes have diverged.
        """
        _merge(self._totals, other._totals)
        _merge(self._messages, other._messages)

    def add_all(self, earlier: "Counters") -> None:
        """Add what was counted before, on the same rows or on others."""
        for mine, theirs in ((self._totals, earlier._totals), (self._messages, earlier._messages)):
            for key, counts in theirs.items():
                _add(mine, key, tuple(counts))


def _merge(mine: dict, theirs: dict) -> None:
    for key, counts in theirs.items():
        if mine.setdefault(key, list(counts)) != counts:
            raise ValueError(
                f"processes disagree on the traffic of {key}: {mine[key]} and {counts}; give all the same seed, loss "
                "process and packet size"
            )


def _add(table: dict, key: object, counts: tuple[int, ...]) -> None:
    totals = table.get(key)
    if totals is None:
        table[key] = list(counts)
        return
    for place, count in enumerate(counts):
        totals[place] += count


def _total(rows: list[dict]) -> dict:
    totals = {name: sum(row[name] for row in rows) for name in COUNTED}
    return {**totals, "observed_loss_rate": totals["lost"] / totals["packets"] if totals["packets"] else None}


def _called(counts: Iterable[list[int]]) -> dict:
    pairs = list(counts)
    return {"called": sum(calls for calls, _ in pairs), "lossy": sum(lossy for _, lossy in pairs)}


DIRECTIONS = ("forward", "backward")
MODULES = ("attention", "mlp")
PHASES = ("reduce", "gather")


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The messages that may lose packets. All others are reliable, and not counted. None means no restriction.

    Args:
        direction: "forward" or "backward".
        module: "attention" or "mlp".
        layers: first transformer layer and the layer after the last, counted from 0.
        phase: "reduce" (contributions on their way to a sum) or "gather" (the sum on its way to the ranks).

    Messages that belong to no layer, such as data-parallel gradients, lie outside every range of layers and every
    module. To restrict links, name them: `LossyNetwork({(0, 1): process})`.
    """

    direction: str | None = None
    module: str | None = None
    layers: tuple[int, int] | None = None
    phase: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("direction", DIRECTIONS), ("module", MODULES), ("phase", PHASES)):
            if getattr(self, name) is not None:
                check_known(name, getattr(self, name), known)
        if self.layers is None:
            return
        check_is("layers", self.layers, (tuple, list), "the first layer and the layer after the last, such as (0, 2)")
        object.__setattr__(self, "layers", tuple(self.layers))
        for end in self.layers:
            check_at_least("layers", end, 0)
        if len(self.layers) != 2 or self.layers[0] >= self.layers[1]:
            raise ValueError(
                f"layers = {self.layers} is not a range: give the first layer and the layer after the last, such as "
                "(0, 2)"
            )

    def covers(self, site: Site | None) -> bool:
        """Return whether a message of this site may lose packets."""
        site = site or NOWHERE
        if self.layers is not None and (site.layer is None or not self.layers[0] <= site.layer < self.layers[1]):
            return False
        mine = (self.direction, self.module, self.phase)
        theirs = (site.direction, site.module, site.phase)
        return all(want is None or want == have for want, have in zip(mine, theirs, strict=True))


EVERYWHERE = Scope()


def links_named(text: str) -> list[Link]:
    """Return the directed links of a text such as ``0>1,2>-1``.

    Raises:
        ValueError: if the text has another form, names a link twice, or names an impossible link.
    """
    matches = [re.fullmatch(r"\s*(-1|\d+)\s*>\s*(-1|\d+)\s*", link) for link in text.split(",")]
    if not all(matches):
        raise ValueError(f"lossy_links = {text!r} is not understood: write source>destination, such as 0>1,2>3")
    links = [checked_link((int(match[1]), int(match[2]))) for match in matches if match]
    for src, dst in links:
        if links.count((src, dst)) > 1:
            raise ValueError(f"lossy_links = {text!r} names {src}>{dst} more than once: name each link once")
    return links


def layers_named(text: str) -> tuple[int, int]:
    """Return the first layer and the layer after the last of a text such as ``0:2``.

    Raises:
        ValueError: if the text has another form.
    """
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if not match:
        raise ValueError(
            f"lossy_layers = {text!r} is not understood: write first:stop, such as 0:2 (in YAML in quotes)"
        )
    return int(match[1]), int(match[2])


# Record losses, and replay them for collectives that gradient checkpointing runs again.


class LossTape:
    """Record the losses of a part of the forward pass on its first run, and replay them on every later run.

    A recomputation may stop early, so every replay starts at the beginning (`LossyNetwork.recording`).
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
