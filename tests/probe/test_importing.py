"""Losses that other programs recorded, in their formats."""

import gzip

import numpy as np
import pandas as pd
import pytest

from lossyprobe import importing
from lossyprobe.importing import import_trace
from lossytp.network import Trace, traces


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def flows(trace):
    return ["".join(str(int(lost)) for lost in flow.lost) for flow in trace.flows.values()]


WIFI = "noise_dbm\ttx\trx\tbits\n-5\tnode1\tnode2\t0010\n-10\tnode1\tnode3\t11\n-5\tnode2\tnode1\t0\n"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        *(("a.txt", "0010\n11\n", ["001011"]), ("a.txt", "0, 0,1 0\r\n\r\n11\n\n\n\n", ["0010", "11"])),
        ("a.csv", "flow;lost\nx;0\ny;1\nx;1\n", ["01", "1"]),
        ("a.csv", "packet,dropped\n5,True\n6,False\n7,true\n", ["101"]),
        ("a.csv", "\ufefflost,flow\n0,1\n1,1\n", ["01"]),  # as spreadsheets write it
        *(("a.txt", "\ufeff0101", ["0101"]), ("a.tsv.gz", gzip.compress(WIFI.encode(), mtime=0), ["0010", "11", "0"])),
        ("a.csv", "lost, src\n0.0, a\n1.0, b\n1.0, a", ["01", "1"]),
        *(("a.csv", "x,Is Delivered\n0,true\n1,false\n", ["01"]), ("a.tsv", "success\n110\n01\n", ["001", "10"])),
        ("a.tsv", "\tlost\n0\t1\n1\t0\n", ["10"]),  # with an index without a name
        ("a.csv", "seq,lost\n7,1\n5,0\n6,0\n", ["001"]),
        ("a.csv", "Packet ID;flow;lost\n2;b;1\n9;a;0\n1;b;0\n", ["01", "0"]),
        ("a.csv", "icmp_seq,received\n3,1\n9,1\n4,1\n", ["0011110"]),
        ("a.csv", "seq,lost\n1,0110\n1,00\n", ["0110", "00"]),
    ],
)
def test_formats(tmp_path, name, content, expected):
    assert flows(import_trace(written(tmp_path, name, content))) == expected


@pytest.mark.parametrize(
    ("array", "expected"),
    [([0, 1], ["01"]), ([[True, False], [False, False]], ["10", "00"]), ([[0.0], [1.0], [1.0]], ["011"])],
)
def test_arrays(tmp_path, array, expected):
    np.save(tmp_path / "a.npy", array)
    assert flows(import_trace(tmp_path / "a.npy")) == expected


def test_machines_and_source_are_kept(tmp_path):
    trace = import_trace(written(tmp_path, "wifi.tsv", WIFI))
    assert [(flow.src, flow.dst) for flow in trace.flows.values()][1:] == [("node1", "node3"), ("node2", "node1")]
    assert trace.source == "imported from wifi.tsv, column bits with 1 for a loss"
    assert trace.clocks == "none"
    with pytest.raises(ValueError, match=r"a\.txt cannot be read"):
        import_trace(tmp_path / "a.txt")
    trace = import_trace(written(tmp_path, "a.csv", "seq,success\n3,1\n1,1\n"))
    assert trace.source.endswith("1 for an arrival, in the order of seq, whose 1 missing numbers were lost")


def test_rows_and_columns_are_chosen(tmp_path):
    path = written(tmp_path, "a.csv", "link,sent,dropped\nup,1,0\ndown,1,1\nup,1,1\n")
    assert flows(import_trace(path, column="dropped", where="link=up")) == ["01"]
    path = written(tmp_path, "a.csv", "tx,rx\n1,1\n1,0\n")
    assert flows(import_trace(path, column="rx", ones="arrived")) == ["01"]
    for content in ("0 1 1", "lost\n0\n1\n1\n", "received\n0\n1\n1\n"):
        path = written(tmp_path, "a.txt", content)
        assert [flows(import_trace(path, ones=ones)) for ones in ("lost", "arrived")] == [["011"], ["100"]]


@pytest.mark.parametrize(
    ("name", "content", "options", "words"),
    [
        *(("a.txt", content, {}, "holds no packets") for content in ("", "0121")),
        ("a.csv", "flow,lost\n", {}, "holds no packets"),
        *(("a.csv", f"a,b\n{row}\n", {}, "of the columns a, b") for row in ("0,1", "5,6")),
        *(("a.csv", f"a,b\n{row}\n", {}, "Expected 2 columns") for row in ("0", "0,1\n\n0,1,1")),
        ("a.csv", b"a,b\n1,1\n\x02\x9c,\x03,\x04", {}, "Expected 2 columns"),
        *(("a.csv", "lost,lost\n0,1\n", {}, "two columns"), ("a.csv", "," * 10_001 + "x", {}, "columns = 10001")),
        ("a.csv", "a,b\nx,0110\ny,02\n", {"column": "b"}, "row 2 has '02' in b"),
        ("a.csv", "lost\n0\n\x1b[2J\n", {}, "row 2 has '\\x1b[2J' in lost"),
        ("a.csv", "seq,lost\n5,0\n5,1\n6,0\n", {}, "seq has 5"),
        *(("a.csv", "seq,lost\n5,0\n7,1\n", {}, "seq lacks 1"), ("a.csv", "seq,ok\n5,1\n-1,1\n", {}, "seq = '-1'")),
        ("a.csv", "seq,ok\n0,1\n999999999,1\n", {}, "packets by seq = 1000000000"),
        ("a.csv", "a,b\n0,3\n", {"column": "c"}, "column = 'c'"),
        *(("a.csv", "a,b\nx,0\n", {"where": where}, f"where = '{where[0]}'") for where in ("a", "c=x")),
        ("a.csv", "a,b\nx,0\n", {"where": "a=y"}, "value of a = 'y'"),
        ("a.txt", "01", {"column": "a"}, "column and where"),
        *(("a.csv", content, {}, "UTF-8") for content in (b"a,lost\n\xff,0\n", b"\xff\xfe0\x00")),
        ("a.tsv.gz", gzip.compress(WIFI.encode(), mtime=0)[:-20], {}, "truncated"),
        *(("a.npy", b"\x93NUMPY" + content, {}, "a.npy") for content in (b"", b" garbage")),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(tmp_path, name, content, options, words):
    with pytest.raises(ValueError, match=r"a\.") as caught:
        import_trace(written(tmp_path, name, content), **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("save", [np.save, np.savez])
def test_an_array_of_other_numbers_or_an_archive_is_refused(tmp_path, save):
    with (tmp_path / "a.npy").open("wb") as file:
        save(file, [0, 2])
    for read in (import_trace, Trace.from_file):
        with pytest.raises(ValueError, match=r"a\.npy is not an array of zeros and ones \(it holds (memmap|NpzFile)"):
            read(tmp_path / "a.npy")


def test_a_table_in_parquet_is_read(tmp_path):
    columns = {
        "x": ["," * 20_000] * 3,
        "seq": [2.0, 0, 1],
        "Received": [True, False, True],
        "nested": [[1], [2], []],
        "link": ["a", "a", "a"],
    }
    pd.DataFrame(columns).drop(columns="nested").to_parquet(tmp_path / "a.parquet", compression=None)
    trace = import_trace(tmp_path / "a.parquet", where="link=a")
    assert flows(trace) == ["100"]
    assert trace.source.endswith("column Received with 1 for an arrival, in the order of seq")
    pd.DataFrame(columns).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: it is neither .*list"):
        import_trace(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"0" * 1001, "number of packets in .* = 1001 is above 1000"),
        ("a.csv", b"lost,x\n" + b"0,1\n" * 501, "number of cells = 1002 is above 1000"),
        ("a.csv", b"lost\n" + b"0\n" * 2000, "number of bytes in .* is above 3000"),
        ("a.txt", b"0\n\n" * 6, "number of flows in .* = 6 is above 5"),
        ("a.csv", b"flow,lost\n1,0\n2,0\n3,0\n4,0\n5,0\n6,0\n", "number of flows = 6 is above 5"),
        ("a.csv", b"bits\n01\n1\n1\n1\n1\n1\n", "number of flows = 6 is above 5"),
    ],
)
def test_more_than_the_limit_is_refused(tmp_path, monkeypatch, name, content, words):
    for limit, value in (("PACKETS", 1000), ("CELLS", 1000), ("BYTES", 3000), ("FLOWS", 5)):
        for module in (importing, traces):
            monkeypatch.setattr(module, f"MOST_{limit}", value, raising=False)
    for packed in (content, gzip.compress(content, mtime=0)):
        with pytest.raises(ValueError, match=words):
            import_trace(written(tmp_path, name, packed))
