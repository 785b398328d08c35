"""Losses that other programs recorded, in their formats."""

import gzip

import numpy as np
import pytest

from lossytp.network import Trace
from lossytp.network.probe.importing import import_trace


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
        ("a.txt", "0010\n11\n", ["001011"]),
        ("a.txt", "0, 0,1 0\r\n\r\n11\n\n\n\n", ["0010", "11"]),
        ("a.txt", "1", ["1"]),
        ("a.csv", "time,lost\n0.1,0\n0.2,1\n", ["01"]),
        ("a.csv", "flow;lost\nx;0\ny;1\nx;1\n", ["01", "1"]),
        ("a.csv", "packet,dropped\n5,True\n6,False\n7,true\n", ["101"]),
        ("a.csv", "\ufefflost,flow\n0,1\n1,1\n", ["01"]),  # as spreadsheets write it
        ("a.txt", "\ufeff0101", ["0101"]),
        ("a.tsv", WIFI, ["0010", "11", "0"]),
        ("a.tsv.gz", gzip.compress(WIFI.encode(), mtime=0), ["0010", "11", "0"]),
    ],
)
def test_formats(tmp_path, name, content, expected):
    assert flows(import_trace(written(tmp_path, name, content))) == expected


@pytest.mark.parametrize(("array", "expected"), [([0, 1], ["01"]), ([[True, False], [False, False]], ["10", "00"])])
def test_arrays(tmp_path, array, expected):
    np.save(tmp_path / "a.npy", array)
    assert flows(import_trace(tmp_path / "a.npy")) == expected


def test_machines_and_source_are_kept(tmp_path):
    trace = import_trace(written(tmp_path, "wifi.tsv", WIFI))
    assert [(flow.src, flow.dst) for flow in trace.flows.values()][1:] == [("node1", "node3"), ("node2", "node1")]
    assert trace.source == "imported from wifi.tsv"
    assert trace.clocks == "none"


def test_rows_and_columns_are_chosen(tmp_path):
    path = written(tmp_path, "a.csv", "link,sent,dropped\nup,1,0\ndown,1,1\nup,1,1\n")
    assert flows(import_trace(path, column="dropped", where="link=up")) == ["01"]


@pytest.mark.parametrize(
    ("name", "content", "options", "words"),
    [
        ("a.txt", "", {}, "holds no packets: give a file with only a 0 or 1 per packet, or a table"),
        ("a.csv", "flow,lost\n", {}, "holds no packets"),
        ("a.txt", "0121", {}, "holds no packets"),
        ("a.csv", "a,b\n0,1\n", {}, "2 of the columns a, b look like losses, not exactly one: name the right one"),
        ("a.csv", "a,b\n5,6\n", {}, "0 of the columns a, b look like losses, not exactly one: name the right one"),
        ("a.csv", "a,b\n0\n", {}, "line 2 has more or fewer fields than the header"),
        ("a.csv", "a,b\n0,1\n\n0\n", {}, "line 4 has more or fewer fields than the header"),
        ("a.csv", "a,b\n0,3\n", {"column": "b"}, "'3' in b is neither 0 nor 1"),
        ("a.csv", "a,b\nx,0110\ny,02\n", {"column": "b"}, "row 2 has '02' in b: give one 0 or 1 per packet"),
        ("a.csv", "a,b\n0,3\n", {"column": "c"}, "column = 'c' is unknown: choose one of a, b"),
        ("a.csv", "a,b\nx,0\n", {"where": "a"}, "where = 'a' has no '=': give NAME=VALUE"),
        ("a.csv", "a,b\nx,0\n", {"where": "c=x"}, "where = 'c' is unknown: choose one of a, b"),
        ("a.csv", "a,b\nx,0\n", {"where": "a=y"}, "the value of a = 'y' is unknown: choose one of x"),
        ("a.txt", "01", {"column": "a"}, "column and where select from a table"),
        ("a.txt", b"\xff\xfe0", {}, "is not a text file"),
        ("a.tsv.gz", gzip.compress(WIFI.encode(), mtime=0)[:-20], {}, "is truncated"),
        ("a.tsv.gz", b"0101", {}, "cannot be read"),
        ("a.npy", b"\x93NUMPY", {}, "a.npy"),
        ("a.npy", b"\x93NUMPY garbage", {}, "not (32, 103)): give one that numpy.save wrote"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(tmp_path, name, content, options, words):
    with pytest.raises(ValueError, match=r"a\.") as caught:
        import_trace(written(tmp_path, name, content), **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_array_of_other_numbers_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", [0, 2])
    with pytest.raises(ValueError, match=r"shape \(2,\) is not one or two axes of zeros and ones"):
        import_trace(tmp_path / "a.npy")


def test_an_archive_with_the_name_of_an_array_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", [0, 1])
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    for read in (import_trace, Trace.from_file):
        with pytest.raises(
            ValueError, match=r"a\.npy: it is an archive of arrays: give one array that numpy.save wrote"
        ):
            read(tmp_path / "a.npy")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.txt cannot be read \(No such file or directory\): give the path"):
        import_trace(tmp_path / "a.txt")
