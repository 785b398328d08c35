"""Read running text for language modelling: documents in a fixed order."""

import codecs
import gzip
import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import pandas as pd
import pyarrow.csv
import pyarrow.parquet

from lossytp.training.files import matching
from lossytp.training.tasks.cache import cached

STDLIB = "stdlib"
PARQUET, SEPARATORS = ".parquet", {".csv": ",", ".tsv": "\t"}
TABLES = (PARQUET, *SEPARATORS, ".json", ".jsonl", ".ndjson")
TEXT_ALONE = pyarrow.schema([("text", pyarrow.string())])
LARGEST_ROW = 2**26  # bytes of a row of csv
CHECKED_BYTES = 2**20  # of a text file, before any is needed
HELD_OUT_PERCENT = 2  # of stdlib's files, or of other files' documents if these are split
HELD_OUT_END = 0.1  # of a single file that is one document
DOCUMENTS_AT_ONCE = 64
TEXT_TYPES = (
    pyarrow.types.is_string,
    pyarrow.types.is_large_string,
    pyarrow.types.is_string_view,
    pyarrow.types.is_null,
)


class Position(NamedTuple):
    """A document's place: row `row` of file `shard`, in pass `epoch` over all files, all counted from 0."""

    epoch: int
    shard: int
    row: int


BEGINNING = Position(0, 0, 0)


@dataclass(frozen=True)
class Corpus:
    """Text files. A table (`TABLES`) has a column `text` with one document a row; any other file is one document.

    Tables other than parquet, and other files, may be compressed (.gz).
    """

    files: tuple[str, ...]
    split: str | None = None
    """Which documents to read: "validation" for a few, chosen by a hash of their text, "train" for the others, None
    for all. Of a single file that is one document, "validation" is the end."""

    def documents(self, start: Position = BEGINNING) -> Iterator[tuple[Position, list[str]]]:
        """Yield lists of documents from `start` on, endlessly, each with the position after it.

        Raises:
            ValueError: if there are no documents.
        """
        epoch, first_shard, first_row = start
        while True:
            found = start != BEGINNING
            for shard in range(first_shard, len(self.files)):
                row = 0
                for texts in self._texts(shard):
                    wanted = texts[max(0, first_row - row) :]
                    row += len(texts)
                    if wanted:
                        found = True
                        yield Position(epoch, shard, row), wanted
                first_row = 0
            if not found:
                raise ValueError(f"{self.who_hold} no text{self.remedy}")
            epoch, first_shard = epoch + 1, 0

    def sha256(self) -> str:
        """Return the hash of the files' contents, in order. It is kept until a file changes.

        Raises:
            ValueError: if a file cannot be read.
        """

        def keep(folder: Path) -> None:
            digest = hashlib.sha256()
            for name in self.files:
                with open(name, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            (folder / "sha256").write_text(digest.hexdigest())

        try:
            states = [(os.path.abspath(name), os.stat(name)) for name in self.files]
            told = [(name, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for name, each in states]
            return (cached("sha256", repr(told), keep) / "sha256").read_text()
        except OSError as error:
            raise _unreadable(error.filename, error) from error

    def check(self) -> None:
        """Check every file before any is needed: the beginning of a text, the columns of a table.

        Raises:
            ValueError: if a file cannot be read, or holds no text.
        """
        for file in self.files:
            if _kind(file) in TABLES:
                with _opened(file):
                    pass
            else:
                _text_in(file, whole=False)

    def texts(self) -> Iterator[str]:
        """Yield all documents once."""
        for position, texts in self.documents():
            if position.epoch:
                return
            yield from texts

    def _texts(self, shard: int) -> Iterator[list[str]]:
        for texts in _texts(self.files[shard]):
            if self.split is not None and len(self.files) == 1 and _kind(self.files[0]) not in TABLES:
                (text,) = texts
                end = round(len(text) * (1 - HELD_OUT_END))
                yield [part for part in (text[end:] if self.split == "validation" else text[:end],) if part]
                return
            yield [
                text for text in texts if text and self.split in (None, "validation" if _held_out(text) else "train")
            ]

    @property
    def who_hold(self) -> str:
        """Return the beginning of an error message: the files, and the verb."""
        others = len(self.files) - 1
        return f"{self.files[0]}{f' and {others} more hold' if others else ' holds'}"

    @property
    def remedy(self) -> str:
        """Return the end of an error message: which split lacks text, and the fix."""
        if self.split is None:
            return ": give more text"
        return f", for {self.split}: give more text, or name separate files with validation_glob"


def corpus(data_glob: str, *, split: str, splits_files: bool = False) -> Corpus:
    """Return the files that a pattern names, sorted; for "stdlib", the sources of Python's standard library.

    Args:
        data_glob: the pattern, or "stdlib".
        split: "train" or "validation", a part of the sources of the standard library.
        splits_files: whether `split` also selects among the documents of other files. If not, all are taken.

    Raises:
        ValueError: if no file matches.
    """
    if data_glob == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        everything = sorted(_python_files(root))
        held_out = [_held_out(str(file.relative_to(root))) for file in everything]
        return Corpus(
            tuple(str(file) for file, held in zip(everything, held_out, strict=True) if held == (split == "validation"))
        )
    files = matching(data_glob)
    if not files and os.path.isdir(os.path.expanduser(data_glob)):
        raise ValueError(
            f"{data_glob!r} is a folder: give a pattern of files, such as {data_glob.rstrip('/')}/*.parquet"
        )
    if not files:
        raise ValueError(f"no file matches {data_glob!r}: give another pattern, or 'stdlib'")
    return Corpus(tuple(files), split if splits_files else None)


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "test")]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _held_out(text: str) -> bool:
    return int(hashlib.blake2b(text.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def _kind(file: str) -> str:
    return Path(file.lower().removesuffix(".gz")).suffix


def _texts(file: str) -> Iterator[list[str]]:
    if _kind(file) not in TABLES:
        yield [_text_in(file)]
        return
    with _opened(file) as columns:
        for column in columns:
            for start in range(0, len(column), DOCUMENTS_AT_ONCE):
                yield column.slice(start, DOCUMENTS_AT_ONCE).to_pylist()


class _Unfit(ValueError):
    """A table that can be read, but holds no texts."""


@contextmanager
def _opened(file: str) -> Iterator[Iterator[pyarrow.Array]]:
    """Open a table, and give its column `text` in pieces. Others may have any values.

    Raises:
        ValueError: if there is no such column, or the file cannot be read, within the block too.
    """
    try:
        if _kind(file) == PARQUET:
            with pyarrow.parquet.ParquetFile(file) as table:
                columns = table.schema_arrow
                _check(file, columns.names, columns.field("text").type if "text" in columns.names else None)
                yield (batch.column(0) for batch in table.iter_batches(DOCUMENTS_AT_ONCE, columns=["text"]))
        elif separator := SEPARATORS.get(_kind(file)):
            _check(file, list(map(str, pd.read_csv(file, sep=separator, nrows=0))))
            rows = pyarrow.csv.open_csv(
                file,
                read_options=pyarrow.csv.ReadOptions(block_size=LARGEST_ROW),
                parse_options=pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
                convert_options=pyarrow.csv.ConvertOptions(include_columns=["text"], column_types=TEXT_ALONE),
            )
            yield (batch.column(0) for batch in rows)
        else:
            frames = _json(file)
            first = next(frames, pd.DataFrame())
            _check(file, list(map(str, first)))
            yield (pyarrow.array(frame["text"], pyarrow.string()) for frame in chain([first], frames))
    except _Unfit:
        raise
    except (pyarrow.ArrowException, OSError, EOFError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"{file} cannot be read ({why}): give a whole {_kind(file)[1:]} file of texts") from error


def _json(file: str) -> Iterator[pd.DataFrame]:
    with _stream(file) as stream:
        if stream.read(CHECKED_BYTES).lstrip()[:1] == b"[":  # a list, not an object a line
            return iter([pd.read_json(file, dtype=False)])
    return iter(pd.read_json(file, dtype=False, lines=True, chunksize=DOCUMENTS_AT_ONCE))


def _check(file: str, names: list[str], kind: Any = TEXT_ALONE.types[0]) -> None:
    if "text" not in names:
        raise _Unfit(f"{file} has no column 'text', but {', '.join(names)[:200] or 'none'}: give a file with one")
    of_values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not any(is_text(of_values) for is_text in TEXT_TYPES):
        raise _Unfit(f"{file} has {kind} in its column 'text': give text")


def _unreadable(file: str, error: Exception) -> ValueError:
    return ValueError(f"{file} cannot be read ({getattr(error, 'strerror', None) or error}): give a readable file")


def _stream(file: str) -> IO[bytes]:
    read: Any = gzip.open if file.lower().endswith(".gz") else open
    return read(file, "rb")


def _text_in(file: str, *, whole: bool = True) -> str:
    """Return the file's text, or that of its first `CHECKED_BYTES`.

    Raises:
        ValueError: if the file is unreadable or not text. Binary data would give many meaningless tokens.
    """
    try:
        with _stream(file) as stream:
            content = stream.read(CHECKED_BYTES)
            if whole and b"\0" not in content:  # a small .gz file may hold gigabytes of zeros
                content += stream.read()
        text = codecs.getincrementaldecoder("utf-8")().decode(content, final=whole)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(file, error) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start}): save it as UTF-8, or "
            "narrow the pattern"
        ) from error
    if "\0" in text:
        raise ValueError(f"{file} is not text (NUL at character {text.index(chr(0))}): narrow the pattern")
    return text.replace("\r\n", "\n").replace("\r", "\n")
