"""Files that are not what they seem."""

import gzip
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lossytp.network import bounded_files
from lossytp.network.bounded_files import check_file, content_of, parquet_in


@pytest.mark.parametrize(
    ("path", "words"),
    [("none", "No such file"), ("a\0b", "null"), (".", "folder"), ("/dev/zero", "a device"), ("pipe", "a pipe")],
)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch, path, words):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for read in (check_file, content_of, parquet_in):
        with pytest.raises(ValueError, match=f"cannot be read .*{words}"):
            read(Path(path))


def test_more_than_the_limit_is_refused(tmp_path, monkeypatch):
    (tmp_path / "plain").write_bytes(bytes(1001))
    (tmp_path / "packed").write_bytes(gzip.compress(bytes(1001), mtime=0))
    pyarrow.parquet.write_table(pyarrow.table({"lost": np.zeros(10**5, np.uint8)}), tmp_path / "table")
    for name in ("plain", "packed"):
        assert len(content_of(tmp_path / name, 1001)) == 1001
        with pytest.raises(ValueError, match=f"{name}.* 1000"):
            content_of(tmp_path / name, 1000)
    assert len(parquet_in(tmp_path / "table", most_bytes=10**5)) == 10**5
    with pytest.raises(ValueError, match=r"table, unpacked, = \d+ is above 50000"):
        parquet_in(tmp_path / "table", most_bytes=50_000)
    monkeypatch.setattr(bounded_files, "MOST_ROWS", 99_999)
    with pytest.raises(ValueError, match=r"rows in .*table = 100000 is above 99999"):
        parquet_in(tmp_path / "table")
