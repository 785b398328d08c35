import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lossytp.network import Trace
from lossytp.network.probe.trace_file import FATES, METADATA, SETTINGS, FlowTrace, ProbeTrace, read_trace, write_trace


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


def test_an_empty_trace_is_written_and_read(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.parquet", ProbeTrace(flows={}))
    assert read_trace(tmp_path / "trace.parquet").flows == {}


def test_a_flow_replays_its_losses(trace: ProbeTrace) -> None:
    assert trace.flows[0].losses() == Trace(lost=[1], num_packets=4)


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"delay_s has shape \(3,\), not \(2,\)"):
        FlowTrace(lost=np.zeros(2), delay_s=np.zeros(3))


SPOILED = {
    "no source": lambda metadata: metadata["flows"][0].update(src=None),
    "rate": lambda metadata: metadata["flows"][0].update(rate_packets_per_s="fast"),
    "setting": lambda metadata: metadata["flows"][0].update({"\x1b[2J": 1}),
    "number": lambda metadata: metadata["flows"][0].update(flow="0"),
    "flows": lambda metadata: metadata.update(flows=["0"]),
    "own losses": lambda metadata: metadata.update(own_losses="\x1b[2J"),
}


def damaged(name: str, path: Path) -> None:
    """Spoil a whole file at `path` in the way of this name."""
    table, content = pyarrow.parquet.read_table(path), path.read_bytes()
    if name == "absent":
        path.unlink()
    elif name == "empty":
        path.write_bytes(b"")
    elif name == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif name == "foreign":
        path.write_text("0 1 0 0 1\n")
    elif name == "text":
        pyarrow.parquet.write_table(table.set_column(2, "lost", [["no"] * len(table)]), path)
    elif name == "numbers":
        pyarrow.parquet.write_table(table.set_column(2, "lost", [[0, 2, 0, 0, 1, 0]]), path)
    elif name == "null":
        pyarrow.parquet.write_table(table.set_column(2, "lost", [[None, *[True] * 5]]), path)
    elif name == "infinite":
        pyarrow.parquet.write_table(table.set_column(3, "sent_s", [[np.inf] * len(table)]), path)
    elif name == "negative":
        duplicates = pyarrow.array([-1] * len(table), pyarrow.int32())
        pyarrow.parquet.write_table(table.set_column(6, "duplicates", duplicates), path)
    elif name == "unsorted":
        pyarrow.parquet.write_table(table.take([4, 5, 0, 1, 2, 3]), path)
    elif name in SPOILED:
        metadata = json.loads(table.schema.metadata[METADATA])
        SPOILED[name](metadata)
        pyarrow.parquet.write_table(table.replace_schema_metadata({METADATA: json.dumps(metadata)}), path)
    elif name == "deep":
        pyarrow.parquet.write_table(table.replace_schema_metadata({METADATA: "[" * 10**6}), path)
    elif name == "other table":
        pyarrow.parquet.write_table(table.replace_schema_metadata({}), path)
    elif name == "newer":
        metadata = table.schema.metadata[METADATA].replace(b'"version": 1', b'"version": 2')
        pyarrow.parquet.write_table(table.replace_schema_metadata({METADATA: metadata}), path)
    elif name == "rows":
        pyarrow.parquet.write_table(table.slice(1), path)
    elif name == "column":
        pyarrow.parquet.write_table(table.drop_columns("lost"), path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "No such file"),
        ("empty", "is truncated, or not a Parquet file"),
        ("truncated", "is truncated, or not a Parquet file"),
        ("foreign", "is truncated, or not a Parquet file"),
        ("other table", "lossytp.probe did not write it"),
        ("newer", "is damaged .it has version 2, but this program reads version 1"),
        ("rows", "is damaged .the sequence numbers of flow 0 have gaps"),
        ("column", "lossytp.probe did not write it"),
        ("text", "is damaged .lost holds string, or nulls, not bool"),
        ("numbers", "is damaged .lost holds int64"),
        ("null", "is damaged .lost holds bool, or nulls"),
        ("infinite", "is damaged .a time is infinite"),
        ("negative", "is damaged .*duplicates is negative"),
        ("unsorted", "is damaged .its rows are not sorted"),
        ("no source", "is damaged .src = None"),
        ("rate", "is damaged .rate_packets_per_s = 'fast'"),
        ("setting", "is damaged .*"),
        ("number", "is damaged .flow = '0'"),
        ("flows", "is damaged .*"),
        ("own losses", "is damaged .own_losses = "),
        ("deep", "is damaged .*"),
    ],
)
def test_other_files_are_refused_in_one_line(name: str, message: str, trace: ProbeTrace, tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(path, trace)
    damaged(name, path)
    with pytest.raises(ValueError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).isprintable()
