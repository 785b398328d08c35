"""Read files that may not be what they seem: regular ones only, and no more of them than a limit."""

import gzip
import os
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lossytp.network.checks import check_at_most, printable

MOST_BYTES, MOST_ROWS = 2**30, 10**8
BATCH_ROWS = 2**13
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"  # what such files begin with


def check_file(path: Path, most_bytes: int = MOST_BYTES) -> os.stat_result:
    """Return a file's status. Raise ValueError unless it is a regular file of at most `most_bytes`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is a folder, a pipe or a device")
    except (OSError, ValueError) as error:  # the latter also of a path that holds a NUL
        reason = getattr(error, "strerror", error)
        raise ValueError(f"{path} cannot be read ({reason}): give the path of a file") from error
    check_at_most(f"the number of bytes in {path}", status.st_size, most_bytes, "a part of the file")
    return status


def content_of(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return a file's bytes, decompressed if gzip packed them. Raise ValueError if these are too many or damaged."""
    check_file(path, most_bytes)
    try:
        with path.open("rb") as raw:
            stream: Any = gzip.GzipFile(fileobj=raw) if raw.peek(len(GZIP)).startswith(GZIP) else raw
            content: bytes = stream.read(most_bytes + 1)
    except (EOFError, OSError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read, or is truncated or damaged ({reason}): copy it again") from error
    check_at_most(f"the number of bytes in {path}, unpacked,", len(content), most_bytes, "a part of it")
    return content


def parquet_in(path: Path, columns: Sequence[str] | None = None, most_bytes: int = MOST_BYTES) -> Any:
    """Return the `pyarrow.Table` in a Parquet file, or some of its columns. Raise KeyError if it lacks one of them.

    Raise ValueError if it cannot be read, or holds too much. A small file can hold any number of equal rows, so that
    the size is counted as batches are decoded.
    """
    import pyarrow.parquet  # slow to import

    check_file(path, most_bytes)
    batches, size = [], 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_at_most(f"the number of rows in {path}", file.metadata.num_rows, MOST_ROWS, "fewer")
            schema = file.schema_arrow
            if columns is not None:
                schema = pyarrow.schema([schema.field(name) for name in columns], schema.metadata)
            for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                batches.append(batch)
                size += batch.nbytes
                check_at_most(f"the number of bytes in {path}, unpacked,", size, most_bytes, "a part of its rows")
            return pyarrow.Table.from_batches(batches, schema)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is truncated, or not a Parquet file ({printable(error)}): copy it again") from error
