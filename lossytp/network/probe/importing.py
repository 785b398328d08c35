"""Read losses that another program recorded: zeros and ones, or a table.

| file | flows |
|---|---|
| zeros and ones as text, with or without commas and spaces | one; a blank line begins another |
| a .npy array of zeros and ones | one per row; one if the array has one axis or one column |
| a table with a header and one packet per row | one, or one per value of the columns `flow`, `src` and `dst` |
| a table with a header and one flow per row | one per row, whose packets are a string of zeros and ones |

A 1 or `true` stands for a lost packet, but for one that arrived in a column named `received`, `success` or the like.
A column named `seq`, `packet` or the like sorts a flow's packets; numbers that it lacks were lost if the table has
arrivals only. Tabs, commas or semicolons separate the fields of a table, or it is a Parquet file. Columns `src` or
`tx`, and `dst` or `rx`, name the machines. Text may be compressed with gzip.
"""

import re
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.csv

from lossytp.network.bounded_files import PARQUET, check_file, content_of, parquet_in
from lossytp.network.checks import check_at_most, check_known, printable, shown
from lossytp.network.probe.trace_file import MOST_PACKETS, FlowTrace, ProbeTrace

MOST_BYTES, MOST_COLUMNS = 2**29, 10_000
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # spreadsheets begin with it
LOST = r"(?i)(is[ _])?(lost|loss|dropped)"  # names of columns that are taken for the losses first
ARRIVED = r"(?i)(is[ _])?(received|arrived|delivered|success(ful)?|ok|acked)"
SEQUENCE = r"(?i)((icmp|packet|pkt)?[ _-]?seq(uence)?|packet|pkt)[ _-]?(no|num|number|id)?"
FATE = r"(?i)[01]+|[01]\.0|false|true"
SOURCES, DESTINATIONS = ("src", "tx"), ("dst", "rx")


def import_trace(
    path: Path, *, column: str | None = None, where: str | None = None, ones: str | None = None
) -> ProbeTrace:
    """Return the losses in a file as a trace, whose `source` says how they were read.

    Args:
        path: a file in one of the formats that the module lists.
        column: the table's column of losses. If None, the one in `LOST` or in `ARRIVED`, or else the only one that
            holds nothing but zeros and ones.
        where: "NAME=VALUE" keeps only those rows of a table whose column NAME has this value.
        ones: what a 1 stands for, "lost" or "arrived". If None, the column's name tells.

    Raises:
        ValueError: if the file cannot be read, has none of these formats, is too large, or holds no packets.
    """
    flows, read = [FlowTrace(lost=each != (ones == "arrived")) for each in lists_in(path)], ""
    try:
        if not flows:
            flows, read = _flows_in(_selected(_table(path), where), column, ones)
        elif column is not None or where is not None:
            raise ValueError("column and where select from a table, and this is a list of zeros and ones: omit them")
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path} ')}") from error
    flows = [flow for flow in flows if flow.num_packets]
    if not flows:
        raise ValueError(
            f"{path} holds no packets: give a file with only a 0 or 1 per packet, or a table with a header"
        )
    return ProbeTrace(flows=dict(enumerate(flows)), source=f"imported from {path.name}{read}")


def lists_in(path: Path) -> list[np.ndarray]:
    """Return the flows in an array, or in text of only zeros and ones: bool, (packets,). Other text has none."""
    if path.suffix == ".npy":
        return list(_array(path))
    content = content_of(path, MOST_BYTES).removeprefix(BYTE_ORDER_MARK)
    if content.translate(None, b"01, \t\r\n"):
        return []
    check_at_most(f"the number of packets in {path}", content.count(b"0") + content.count(b"1"), MOST_PACKETS)
    parts = re.split(rb"\n\s*\n", content.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
    return [_ones(part.translate(None, b", \t\r\n")) for part in parts if part.strip()]


def _array(path: Path) -> np.ndarray:
    """Return the zeros and ones in a .npy file, bool, (flows, packets)."""
    check_file(path)
    try:
        array: Any = np.load(path, mmap_mode="r")  # which believes no header that exceeds the file
    except (ValueError, EOFError, BadZipFile) as error:  # the latter two of an empty .npy and of half an .npz
        raise ValueError(f"{path} is not an array ({error}): give one that numpy.save wrote") from error
    numbers = isinstance(array, np.ndarray) and array.dtype.kind in "biuf" and array.ndim in (1, 2)
    if not numbers or array.size > MOST_PACKETS or not np.isin(array, (0, 1)).all():
        fix = f"give one array with a 0 or 1 per packet, of at most {MOST_PACKETS} packets"
        raise ValueError(f"{path} holds {shown(array)}, not one or two axes of zeros and ones: {fix}")
    return np.atleast_2d(array[:, 0] if array.shape[1:] == (1,) else array).astype(np.bool_)


def _ones(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8) == ord("1")


def _table(path: Path) -> pd.DataFrame:
    """Return the text of a table's cells, without blanks around it."""
    content = content_of(path, MOST_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip() + b"\n"
    if not content.strip():
        return pd.DataFrame()
    header = re.split(rb"[\r\n]", content, maxsplit=1)[0]
    delimiter = max(b"\t", b",", b";", key=header.count)
    check_at_most("the number of columns", header.count(delimiter), MOST_COLUMNS)
    text = {f"f{number}": pyarrow.string() for number in range(header.count(delimiter) + 1)}
    try:
        if content.startswith(PARQUET):
            table = parquet_in(path, most_bytes=MOST_BYTES)
        else:
            table = pyarrow.csv.read_csv(
                pyarrow.BufferReader(content),
                # in one block, because a field may hold a flow's packets
                pyarrow.csv.ReadOptions(block_size=len(content), autogenerate_column_names=True, use_threads=False),
                pyarrow.csv.ParseOptions(delimiter=delimiter.decode()),
                pyarrow.csv.ConvertOptions(column_types=text),
            )
            table = table.slice(1).rename_columns([cells[0].as_py().strip() for cells in table.columns])
        table = table.cast(pyarrow.schema([(name, pyarrow.string()) for name in table.column_names]))
    except pyarrow.ArrowException as error:
        raise ValueError(f"it is not a table of text in UTF-8 ({printable(error)}): mend it there") from error
    if len(set(table.column_names)) < table.num_columns:
        raise ValueError("two columns have the same name: rename one")
    check_at_most("the number of rows", len(table), MOST_PACKETS)
    return table.to_pandas(types_mapper=pd.ArrowDtype).fillna("").apply(lambda cells: cells.str.strip())


def _selected(rows: pd.DataFrame, where: str | None) -> pd.DataFrame:
    if where is None:
        return rows
    name, equals, value = where.partition("=")
    if not equals:
        raise ValueError(f"where = {where!r} has no '=': give NAME=VALUE")
    check_known("where", name, rows)
    kept = rows[rows[name] == value]
    if kept.empty:
        check_known(f"the value of {name}", value, sorted(set(rows[name]))[:20])
    return kept.reset_index(drop=True)


def _flows_in(rows: pd.DataFrame, column: str | None, ones: str | None) -> tuple[list[FlowTrace], str]:
    """Return the flows in a table's rows, and words on how they were read."""
    if rows.empty:
        return [], ""
    name = _column_of_losses(rows, column)
    arrived = ones == "arrived" if ones else re.fullmatch(ARRIVED, name) is not None
    said = f", column {name} with 1 for {'an arrival' if arrived else 'a loss'}"
    wrong = ~rows[name].str.fullmatch(FATE).to_numpy(bool)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"row {row + 1} has {shown(rows[name][row])} in {name}: give one 0 or 1 per packet")
    bits = rows[name].str.lower().replace({"0.0": "0", "1.0": "1", "false": "0", "true": "1"})
    sequence = [each for each in rows.columns if re.fullmatch(SEQUENCE, each) and each != name]
    keys: Any = [key for key in ("flow", *SOURCES, *DESTINATIONS) if key in rows] or np.zeros(len(rows))
    if (bits.str.len() > 1).any():  # a flow per row
        keys, sequence = rows.index, []
    group, bits_of_row = rows.groupby(keys, sort=False).ngroup().to_numpy(), bits.to_numpy()
    by_flow = group.argsort(kind="stable")
    src, dst = (
        next((rows[end].to_numpy() for end in ends if end in rows), np.full(len(rows), default))
        for ends, default in ((SOURCES, "0"), (DESTINATIONS, "1"))
    )
    flows, missing = [], 0
    for flow in np.split(by_flow, np.flatnonzero(np.diff(group[by_flow])) + 1):
        lost = _ones("".join(bits_of_row[flow]).encode()) != arrived
        if sequence:
            lost = _in_order(lost, rows[sequence[0]].iloc[flow], MOST_PACKETS - missing)
            missing += len(lost) - len(flow)
        flows.append(FlowTrace(lost=lost, src=str(src[flow[0]]), dst=str(dst[flow[0]])))
    if missing and sum(flow.lost.sum() for flow in flows) > missing:
        raise ValueError(
            f"{sequence[0]} lacks {missing} numbers, but the file names its lost packets: add the missing rows, or "
            "rename this column if the rows are in order without these"
        )
    if sequence:
        said += f", in the order of {sequence[0]}" + (f", whose {missing} missing numbers were lost" if missing else "")
    return flows, said


def _column_of_losses(rows: pd.DataFrame, column: str | None) -> str:
    if column is not None:
        check_known("column", column, rows)
        return column
    named = ([name for name in rows.columns if re.fullmatch(known, name)] for known in (LOST, ARRIVED))
    found = next(filter(None, named), [name for name in rows.columns if rows[name].str.fullmatch(FATE).all()])
    if len(found) != 1:
        known = f"{len(found)} of the columns {', '.join(rows.columns)}"
        raise ValueError(f"{known} look like losses, not exactly one: name the right one with --column")
    return found[0]


def _in_order(lost: np.ndarray, sequence: pd.Series, most: int) -> np.ndarray:
    """Return the fates of one flow's packets by sequence number, with those that it lacks as lost."""
    name = sequence.name
    for text in sequence[~sequence.str.fullmatch(r"\d{1,18}(\.0)?")]:
        raise ValueError(f"{name} = {shown(text)} is not a whole number from 0: mend it, or rename this column")
    number = sequence.str.removesuffix(".0").astype("int64[pyarrow]").to_numpy(np.int64)
    values, places, times = np.unique(number, return_index=True, return_counts=True)
    if len(values) < len(number):
        raise ValueError(
            f"{name} has {values[times.argmax()]} {times.max()} times: keep one row per packet, tell flows apart in a "
            "column flow, or rename this column if the rows are in order"
        )
    check_at_most(f"the last {name} of a flow less the first", int(values[-1] - values[0]), most)
    all_lost = np.ones(values[-1] - values[0] + 1, np.bool_)
    all_lost[values - values[0]] = lost[places]
    return all_lost
