"""The command that imports losses."""

import gzip

import pytest

from lossytp.network.probe.trace_file import read_trace
from lossytp.probe import import_trace


def test_writes_a_trace_and_says_what_is_in_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.csv").write_text("flow,link,lost\n0,up,1\n0,up,0\n1,up,0\n1,down,1\n")
    import_trace.main(["losses.csv", "--where", "link=up"])
    assert capsys.readouterr().out == "2 flows, 3 packets, 1 lost; see losses.parquet\n"
    assert [flow.lost.tolist() for flow in read_trace(tmp_path / "losses.parquet").flows.values()] == [
        [True, False],
        [False],
    ]


def test_the_output_is_a_parquet_file(tmp_path):
    with pytest.raises(ValueError, match=r"does not end in \.parquet: give b\.parquet"):
        import_trace.main([str(tmp_path / "a.txt"), "--output", "b.csv"])


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
