import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lossyprobe.trace_file import FATES, SETTINGS, FlowTrace, ProbeTrace, read_trace, write_trace
from lossytp.network.traces import METADATA


@pytest.fixture
def trace() -> ProbeTrace:
    measured = FlowTrace(
        lost=np.array([False, True, False, False]),
        sent_s=np.array([0.0, 1e-3, 2e-3, 3e-3]),
        delay_s=np.array([0.0, np.nan, 5e-3, 1e-4]),
        reordered=np.array([False, False, True, False]),
        duplicates=np.array([0, 0, 2, 0]),
        src="here",
        dst="there",
        packet_bytes=1500,
        rate_packets_per_s=1000.0,
    )
    return ProbeTrace(
        flows={0: measured, 3: FlowTrace(lost=np.array([True, False]))}, clocks="different", complete=False, source="me"
    )


def test_what_is_written_is_read(trace: ProbeTrace, tmp_path: Path) -> None:
    write_trace(tmp_path / "new" / "trace.parquet", trace)
    again = read_trace(tmp_path / "new" / "trace.parquet")
    assert list(again.flows) == [0, 3]
    assert (again.clocks, again.complete, again.source) == ("different", False, "me")
    for number, flow in trace.flows.items():
        for name in (*FATES, *SETTINGS):
            written, read = getattr(flow, name), getattr(again.flows[number], name)
            np.testing.assert_array_equal(read, written)
            assert getattr(read, "dtype", None) == getattr(written, "dtype", None)


def test_columns_have_the_documented_types(trace: ProbeTrace, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.parquet", trace)
    table = pyarrow.parquet.read_table(tmp_path / "trace.parquet")
    types = {name: str(kind) for name, kind in zip(table.schema.names, table.schema.types, strict=True)}
    assert types == {
        "flow": "int32",
        "sequence": "int64",
        "sent_s": "double",
        "lost": "bool",
        "delay_s": "double",
        "reordered": "bool",
        "duplicates": "int32",
    }
    assert table["delay_s"].null_count == 3  # lost or unknown, and not NaN
    assert [path.name for path in tmp_path.iterdir()] == ["trace.parquet"]


@pytest.mark.parametrize("content", [None, slice(0), slice(500), b"0 1 0 0 1\n"], ids=str)
def test_damaged_files_are_refused(content: slice | bytes | None, trace: ProbeTrace, tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    if content is not None:
        write_trace(path, trace)
        path.write_bytes(path.read_bytes()[content] if isinstance(content, slice) else content)
    with pytest.raises(
        ValueError, match="No such file" if content is None else "truncated, or not a Parquet"
    ) as caught:
        read_trace(path)
    assert str(caught.value).isprintable()


Spoil = Callable[[Any], Any]


def about(change: Spoil) -> Spoil:
    """A function that changes a table's metadata."""

    def spoil(table: Any) -> Any:
        metadata = json.loads(table.schema.metadata[METADATA])
        change(metadata)
        return table.replace_schema_metadata({METADATA: json.dumps(metadata)})

    return spoil


def flow(**settings: Any) -> Spoil:
    return about(lambda metadata: metadata["flows"][0].update(settings))


FOREIGN, ESCAPE = "lossyprobe did not write it", "\x1b[2J"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda table: table.replace_schema_metadata({}), FOREIGN),
        *((lambda table: table.drop_columns("lost"), FOREIGN), (lambda table: table.slice(1), "damaged")),
        (lambda table: table.take([4, 5, 0, 1, 2, 3]), "damaged"),
        (lambda table: table.set_column(2, "lost", [["no"] * 6]), "damaged"),
        (lambda table: table.set_column(2, "lost", [[0, 2, 0, 0, 1, 0]]), "damaged"),
        (lambda table: table.set_column(2, "lost", [[None, *[True] * 5]]), "damaged"),
        (lambda table: table.replace_schema_metadata({METADATA: "[" * 10**6}), "damaged"),
        (about(lambda metadata: metadata.update(version=2)), "damaged .version = 2"),
        (about(lambda metadata: metadata.update(flows=["0"])), "damaged"),
        *((about(lambda metadata: metadata["flows"].pop()), "its metadata lack a flow"), (flow(flow="0"), "damaged")),
        (flow(**{ESCAPE: 1}), "damaged"),
    ],
)
def test_other_tables_are_refused_in_one_line(spoil: Spoil, message: str, trace: ProbeTrace, tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(path, trace)
    pyarrow.parquet.write_table(spoil(pyarrow.parquet.read_table(path)), path)
    with pytest.raises(ValueError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).isprintable()
