"""The command that imports losses."""

import gzip

import pytest

from lossytp.network.traces import read_trace
from lossytp.probe import import_trace


def test_writes_a_trace_and_says_what_is_in_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.csv").write_text("flow,link,lost\n0,up,1\n0,up,0\n1,up,0\n1,down,1\n")
    import_trace.main(["losses.csv", "--where", "link=up"])
    assert capsys.readouterr().out == (
        "imported from losses.csv, column lost with 1 for a loss: 2 flows, 3 packets, 1 lost; see losses.parquet\n"
    )
    assert [flow.lost.tolist() for flow in read_trace(tmp_path / "losses.parquet").flows.values()] == [
        [True, False],
        [False],
    ]


def test_the_output_is_a_parquet_file(tmp_path):
    with pytest.raises(ValueError, match=r"does not end in \.parquet: give b\.parquet"):
        import_trace.main([str(tmp_path / "a.txt"), "--output", "b.csv"])


def test_more_than_half_lost_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.csv").write_text("state\n1\n1\n0\n")
    import_trace.main(["log.csv"])
    assert "WARNING: 66.7%" in capsys.readouterr().out
    import_trace.main(["log.csv", "--ones", "arrived"])
    assert "WARNING" not in capsys.readouterr().out
    assert read_trace(tmp_path / "log.parquet").all_lost().tolist() == [False, False, True]


@pytest.mark.parametrize("words", [["a.parquet"], ["a.csv", "--output", ""]])
def test_the_output_replaces_no_input_and_has_a_name(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_text("mine")
    with pytest.raises(ValueError, match="output = "):
        import_trace.main(words)
    assert (tmp_path / "a.parquet").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "trace"), [("run.1.csv", "run.1.parquet"), ("a.csv.gz", "a.parquet"), (".hidden.csv", ".hidden.parquet")]
)
def test_the_output_has_the_files_name(tmp_path, monkeypatch, name, trace):
    monkeypatch.chdir(tmp_path)
    opened = gzip.open if name.endswith(".gz") else open
    with opened(name, "wt") as file:
        file.write("lost\n0\n1\n")
    import_trace.main([name])
    assert (tmp_path / trace).is_file()
