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

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.csv

from lossyprobe.trace_file import FlowTrace, ProbeTrace
from lossytp.network.bounded_files import PARQUET, content_of, parquet_in
from lossytp.network.checks import check_at_most, check_known, printable, shown
from lossytp.network.traces import BYTE_ORDER_MARK, MOST_BYTES, MOST_FLOWS, MOST_PACKETS, bits_of, lists_in

MOST_CELLS, MOST_COLUMNS = 5 * 10**7, 10_000
LOST = r"(?i)(is[ _])?(lost|loss|dropped)"  # names of columns that are taken for the losses first
ARRIVED = r"(?i)(is[ _])?(received|arrived|delivered|success(ful)?|ok|acked)"
SEQUENCE = r"(?i)((icmp|packet|pkt)?[ _-]?seq(uence)?|packet|pkt)[ _-]?(no|num|number|id)?"
FATE = r"(?i)[01]+|[01]\.0|false|true"
NO_PACKETS = "it holds no packets: give a file with only a 0 or 1 per packet, or a table with a header"
ENDS = {"tx": "src", "rx": "dst"}  # other names of the columns that name machines


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
            flows, read = _flows_in(_table(path), column, where, ones)
        elif column is not None or where is not None:
            raise ValueError("column and where select from a table, and this is a list of zeros and ones: omit them")
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path} ')}") from error
    return ProbeTrace(flows=dict(enumerate(flows)), source=f"imported from {path.name}{read}")


def _table(path: Path) -> pd.DataFrame:
    """Return the text of a table's cells, without blanks around it."""
    content = content_of(path, MOST_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip(b"\r\n") + b"\n"
    if not content.strip():
        raise ValueError(NO_PACKETS)
    try:
        if content.startswith(PARQUET):
            table = parquet_in(path, most_bytes=MOST_BYTES)
        else:
            header = re.split(rb"[\r\n]", content, maxsplit=1)[0]
            delimiter = max(b"\t", b",", b";", key=header.count)
            check_at_most("the number of columns", header.count(delimiter), MOST_COLUMNS)
            text = {f"f{number}": pyarrow.string() for number in range(header.count(delimiter) + 1)}
            table = pyarrow.csv.read_csv(
                pyarrow.BufferReader(content),
                # in one block, because a field may hold a flow's packets
                pyarrow.csv.ReadOptions(block_size=len(content), autogenerate_column_names=True, use_threads=False),
                pyarrow.csv.ParseOptions(delimiter=delimiter.decode()),
                pyarrow.csv.ConvertOptions(column_types=text),
            )
            table = table.slice(1).rename_columns([cells[0].as_py().strip() for cells in table.columns])
        check_at_most("the number of cells", table.num_rows * table.num_columns, MOST_CELLS, "a part of the table")
        table = table.cast(pyarrow.schema([(name, pyarrow.string()) for name in table.column_names]))
    except pyarrow.ArrowException as error:
        reason = printable(re.sub(r"(, got \d+): .*", r"\1", str(error), flags=re.DOTALL))  # the row may be binary
        fix = "mend that row, or give another file"
        raise ValueError(f"it is neither zeros and ones nor a table in UTF-8 ({reason}): {fix}") from error
    if len(set(table.column_names)) < table.num_columns:
        raise ValueError("two columns have the same name: rename one")
    return table.to_pandas(types_mapper=pd.ArrowDtype).fillna("").apply(lambda cells: cells.str.strip())


def _flows_in(
    rows: pd.DataFrame, column: str | None, where: str | None, ones: str | None
) -> tuple[list[FlowTrace], str]:
    """Return the flows in a table's rows, and words on how they were read."""
    if where is not None:
        key, equals, value = where.partition("=")
        if not equals:
            raise ValueError(f"where = {where!r} has no '=': give NAME=VALUE")
        check_known("where", key, rows)
        kept = rows[rows[key] == value].reset_index(drop=True)
        if kept.empty:
            check_known(f"the value of {key}", value, sorted(set(rows[key]))[:20])
        rows = kept
    if rows.empty:
        raise ValueError(NO_PACKETS)
    name = _column_of_losses(rows, column)
    arrived = ones == "arrived" if ones else re.fullmatch(ARRIVED, name) is not None
    said = f", column {name} with 1 for {'an arrival' if arrived else 'a loss'}"
    wrong = ~rows[name].str.fullmatch(FATE).to_numpy(bool)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"row {row + 1} has {shown(rows[name][row])} in {name}: give one 0 or 1 per packet")
    bits = rows[name].str.lower().replace({"0.0": "0", "1.0": "1", "false": "0", "true": "1"}).to_numpy()
    others = rows.drop(columns=name).rename(columns={old: new for old, new in ENDS.items() if new not in rows})
    keys = [key for key in ("flow", "src", "dst") if key in others]
    number: np.ndarray = np.arange(len(rows))
    group = others.groupby(keys, sort=False).ngroup().to_numpy() if keys else np.zeros_like(number)
    sequence = next(filter(re.compile(SEQUENCE).fullmatch, others.columns), None)
    if rows[name].str.fullmatch("[01]{2,}").any():  # a flow per row
        sequence, group = None, number
    check_at_most("the number of flows", int(group.max()) + 1, MOST_FLOWS)
    if sequence:
        for text in others[sequence][~others[sequence].str.fullmatch(r"\d{1,18}(\.0)?")]:
            raise ValueError(f"{sequence} = {shown(text)} is not a whole number from 0: mend it, or rename this column")
        number = others[sequence].str.removesuffix(".0").astype("int64[pyarrow]").to_numpy(np.int64)
    order, flows, missing = np.lexsort((number, group)), [], 0
    for flow in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        lost, at = bits_of("".join(bits[flow]).encode()) != arrived, number[flow] - number[flow[0]]
        if sequence:
            for again in flow[1:][np.diff(at) == 0]:
                raise ValueError(
                    f"{sequence} has {number[again]} more than once: keep one row per packet, tell flows apart in a "
                    "column flow, or rename this column if the rows are in order"
                )
            missing += int(at[-1]) + 1 - len(at)
            check_at_most(f"the number of packets by {sequence}", len(rows) + missing, MOST_PACKETS)
            seen, lost = lost, np.ones(at[-1] + 1, np.bool_)
            lost[at] = seen
        flows.append(FlowTrace(lost=lost, **{key: others[key].iloc[flow[0]] for key in keys if key != "flow"}))
    if missing and sum(flow.lost.sum() for flow in flows) > missing:
        raise ValueError(
            f"{sequence} lacks {missing} numbers, but the file names its lost packets: add the missing rows, or "
            "rename this column if the rows are in order without these"
        )
    if sequence:
        said += f", in the order of {sequence}" + (f", whose {missing} missing numbers were lost" if missing else "")
    return flows, said


def _column_of_losses(rows: pd.DataFrame, column: str | None) -> str:
    names = list(rows.columns)
    if column is None:
        named = ([name for name in names if re.fullmatch(known, name)] for known in (LOST, ARRIVED))
        found = next(filter(None, named), None) or [name for name in names if rows[name].str.fullmatch(FATE).all()]
        if len(found) != 1:
            known = f"{len(found)} of the columns {printable(', '.join(names))}"
            raise ValueError(f"{known} look like losses, not exactly one: name the right one with --column")
        column = found[0]
    check_known("column", column, names)
    return column
