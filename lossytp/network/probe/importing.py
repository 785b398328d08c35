"""Read losses that another program recorded: zeros and ones, or a table.

| file | flows |
|---|---|
| zeros and ones as text, with or without commas and spaces | one; a blank line begins another |
| a .npy array of zeros and ones | one if the array has one axis, one per row if it has two |
| a table with a header and one packet per row | one, or one per value of the column `flow` |
| a table with a header and one flow per row | one per row, whose packets are a string of zeros and ones |

A 1 stands for a lost packet. In a table of packets, so does `true`. Tabs, commas or semicolons separate the fields of a
table. Columns `src` or `tx`, and `dst` or `rx`, name the machines. Files may be compressed with gzip.
"""

import csv
import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from lossytp.network.checks import check_known
from lossytp.network.probe.trace_file import FlowTrace, ProbeTrace
from lossytp.network.trace import array_in

NAMES = ("lost", "is_lost", "loss")  # of columns that are taken for the losses first
FATES = {"0": False, "1": True, "false": False, "true": True}
SOURCES, DESTINATIONS = ("src", "tx"), ("dst", "rx")
Rows = list[dict[str, str]]


def import_trace(path: Path, *, column: str | None = None, where: str | None = None) -> ProbeTrace:
    """Return the losses in a file as a trace.

    Args:
        path: a file in one of the formats that the module lists.
        column: the table's column of losses. If None, the one named `lost`, `is_lost` or `loss`, or else the only one
            that holds nothing but zeros and ones.
        where: "NAME=VALUE" keeps only those rows of a table whose column NAME has this value.

    Raises:
        ValueError: if the file cannot be read, has none of these formats, or holds no packets.
    """
    try:
        flows = _flows(path, column, where)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{path} cannot be read ({reason}): give the path of a file") from error
    except (EOFError, BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is truncated ({error}): copy it again") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file ({error.reason}): give zeros and ones, or a table") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    flows = [flow for flow in flows if flow.num_packets]
    if not flows:
        raise ValueError(
            f"{path} holds no packets: give a file with only a 0 or 1 per packet, or a table with a header"
        )
    return ProbeTrace(flows=dict(enumerate(flows)), source=f"imported from {path.name}")


def _flows(path: Path, column: str | None, where: str | None) -> list[FlowTrace]:
    if path.suffix == ".npy":
        return [FlowTrace(lost=row) for row in np.atleast_2d(_zeros_and_ones(array_in(path)))]
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig") as file:  # spreadsheets begin with a byte-order mark
        text = file.read()
    if set(text) <= set("01, \t\r\n"):
        if column is not None or where is not None:
            raise ValueError("column and where select from a table, and this is a list of zeros and ones: omit them")
        parts = "\n".join(line.strip() for line in text.splitlines()).split("\n\n")
        return [FlowTrace(lost=_bits("".join(part.replace(",", " ").split()))) for part in parts]
    rows = _selected(_table(text), where)
    name = _column_of_losses(rows, column)
    return _flows_in_rows(rows, name) if _is_flow_per_row(rows, name) else _flows_of_packets(rows, name)


def _zeros_and_ones(values: np.ndarray) -> np.ndarray:
    if values.ndim not in (1, 2) or not np.isin(values, (0, 1)).all():
        raise ValueError(
            f"an array of shape {values.shape} is not one or two axes of zeros and ones: give one 0 or 1 per packet"
        )
    return values


def _bits(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8) == ord("1")


def _table(text: str) -> Rows:
    header = text.split("\n", 1)[0]
    delimiter = max("\t,;", key=header.count)
    csv.field_size_limit(2**31 - 1)  # a field may hold a flow's packets
    reader = csv.DictReader(text.splitlines(), delimiter=delimiter)
    rows = []
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(
                f"line {reader.line_num} has more or fewer fields than the header: complete it, or delete it"
            )
        rows.append(row)
    return rows


def _selected(rows: Rows, where: str | None) -> Rows:
    if where is None or not rows:
        return rows
    name, equals, value = where.partition("=")
    if not equals:
        raise ValueError(f"where = {where!r} has no '=': give NAME=VALUE")
    check_known("where", name, rows[0])
    kept = [row for row in rows if row[name] == value]
    if not kept:
        check_known(f"the value of {name}", value, sorted({row[name] for row in rows})[:20])
    return kept


def _column_of_losses(rows: Rows, column: str | None) -> str:
    if not rows:
        return ""
    if column is not None:
        check_known("column", column, rows[0])
        return column
    named = [name for name in NAMES if name in rows[0]]
    found = named or [name for name in rows[0] if all(_is_fate(row[name]) for row in rows)]
    if len(found) != 1:
        known = f"{len(found)} of the columns {', '.join(rows[0])}"
        raise ValueError(f"{known} look like losses, not exactly one: name the right one with --column")
    return found[0]


def _is_fate(value: str) -> bool:
    return value.lower() in FATES or (bool(value) and set(value) <= {"0", "1"})


def _is_flow_per_row(rows: Rows, name: str) -> bool:
    return any(len(row[name]) > 1 and row[name].lower() not in FATES for row in rows)


def _flows_in_rows(rows: Rows, name: str) -> list[FlowTrace]:
    for number, row in enumerate(rows, 1):
        if set(row[name]) - {"0", "1"}:
            raise ValueError(f"row {number} has {row[name][:20]!r} in {name}: give one 0 or 1 per packet")
    return [_flow(_bits(row[name]), row) for row in rows]


def _flows_of_packets(rows: Rows, name: str) -> list[FlowTrace]:
    by_flow: dict[str, Rows] = {}
    for row in rows:
        if row[name].lower() not in FATES:
            raise ValueError(f"{row[name]!r} in {name} is neither 0 nor 1: give one 0 or 1 per packet")
        by_flow.setdefault(row.get("flow", ""), []).append(row)
    return [_flow(np.array([FATES[row[name].lower()] for row in flow]), flow[0]) for flow in by_flow.values()]


def _flow(lost: np.ndarray, row: dict[str, str]) -> FlowTrace:
    return FlowTrace(lost=lost, src=_first(row, SOURCES, "0"), dst=_first(row, DESTINATIONS, "1"))


def _first(row: dict[str, str], names: Iterable[str], default: str) -> str:
    return next((row[name] for name in names if name in row), default)
