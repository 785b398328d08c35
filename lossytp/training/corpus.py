"""Read running text, document by document, from files, from the hub or from Python's own sources."""

import codecs
import csv
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet

from lossytp.network.bounded_files import check_file, content_of, unpacked
from lossytp.network.checks import check_known, printable, shown
from lossytp.training.files import first_line, matching
from lossytp.training.rows import DATA_VARIABLE, EXPORT, Source, cached, hub_or_its_cache

STDLIB = "stdlib"
PARQUET, SEPARATORS = ".parquet", {".csv": ",", ".tsv": "\t"}
TABLES = (PARQUET, *SEPARATORS, ".json", ".jsonl", ".ndjson")
MOST_BYTES = 2**31  # of a text, or of a list in JSON, once they are unpacked
LONGEST_LINE = 2**26
CHECKED_BYTES = 2**20  # of a text file, before any is needed
HELD_OUT_PERCENT = 2  # of stdlib's files, or of other files' documents if these are split
HELD_OUT_END = 0.1  # of a single file that is one document
DOCUMENTS_AT_ONCE = 64


class Position(NamedTuple):
    """A document's place: row `row` of file `shard`, in pass `epoch` over all files, all counted from 0."""

    epoch: int
    shard: int
    row: int


BEGINNING = Position(0, 0, 0)


@dataclass(frozen=True)
class Corpus:
    """Text files. A table (`TABLES`) has a column `text` with one document a row; any other file is one document.

    Any of them may be compressed (.gz).
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
                raise self.lacks("no text")
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

        states = [(os.path.abspath(name), check_file(Path(name), sys.maxsize)) for name in self.files]
        key = repr([(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in states])
        return (cached("sha256", key, keep) / "sha256").read_text()

    def check(self) -> None:
        """Check every file before any is needed: the beginning of a text, the columns of a table.

        Raises:
            ValueError: if a file cannot be read, or holds no text.
        """
        for file in self.files:
            next(_texts(file), None)

    def texts(self) -> Iterator[str]:
        """Yield all documents once."""
        for position, texts in self.documents():
            if position.epoch:
                return
            yield from texts

    def _texts(self, shard: int) -> Iterator[list[str]]:
        for texts in _texts(self.files[shard]):
            if texts and self.split is not None and len(self.files) == 1 and _kind(self.files[0]) not in TABLES:
                (text,) = texts
                end = round(len(text) * (1 - HELD_OUT_END))
                yield [part for part in (text[end:] if self.split == "validation" else text[:end],) if part]
                return
            yield [
                text for text in texts if text and self.split in (None, "validation" if _held_out(text) else "train")
            ]

    def lacks(self, what: str) -> ValueError:
        """Return the error that the files hold only `what`, with the fix."""
        others = len(self.files) - 1
        fix = ": give more text"
        if self.split is not None:
            fix = f", for {self.split}{fix}, or name separate files with validation_glob"
        return ValueError(f"{self.files[0]}{f' and {others} more hold' if others else ' holds'} {what}{fix}")


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
        root, wanted = Path(sysconfig.get_paths()["stdlib"]), split == "validation"
        found = sorted(file for file in _python_files(root) if _held_out(str(file.relative_to(root))) == wanted)
        return Corpus(tuple(map(str, found)))
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
    """Yield the documents of a file. The first list is empty, once the file has begun as it should."""
    if _kind(file) not in TABLES:
        with unpacked(Path(file), MOST_BYTES) as stream:
            _decoded(file, stream.read(CHECKED_BYTES), final=False)
        yield []
        yield [_decoded(file, content_of(Path(file), MOST_BYTES), final=True)]
        return
    rows = _rows(file)
    names = next(rows)
    if "text" not in names:
        others = printable(", ".join(names)) or "none"
        raise ValueError(f"{file} has no column 'text', but {others}: give a file with one")
    yield []
    while some := list(islice(rows, DOCUMENTS_AT_ONCE)):
        for row in some:
            if not isinstance(row, dict) or not isinstance(row.get("text"), str | None):
                raise ValueError(f"{file} has a row whose 'text' is no text, {shown(row)}: give text")
        yield [(row.get("text") or "").encode(errors="replace").decode() for row in some]  # JSON has half characters


def _rows(file: str) -> Iterator[Any]:
    """Yield the names of a table's columns, then its rows, as objects; of Parquet only their texts."""
    with unpacked(Path(file)) as stream:
        try:
            if _kind(file) == PARQUET:
                shard = pyarrow.parquet.ParquetFile(stream)
                yield shard.schema_arrow.names
                for batch in shard.iter_batches(DOCUMENTS_AT_ONCE, columns=["text"]):
                    yield from batch.to_pylist()
                return
            content = TextIOWrapper(stream, encoding="utf-8-sig", newline="")
            lines = iter(lambda: content.readline(LONGEST_LINE), "")
            if separator := SEPARATORS.get(_kind(file)):
                csv.field_size_limit(LONGEST_LINE - 1)  # what fills a line may go on in the next
                table = csv.reader(lines, delimiter=separator, strict=True)
                names = next(table, [])
                yield names
                for cells in filter(None, table):
                    row = dict(zip(names, cells, strict=False))
                    if not len(row) == len(names) == len(cells):
                        raise ValueError(f"line {table.line_num} has not one cell for each name of a column")
                    yield row
                return
            first = next(lines, "")
            rows = map(json.loads, filter(str.strip, chain([first], lines)))
            if first.startswith("["):  # a list, not an object a line
                rows = iter(json.loads(content_of(Path(file), MOST_BYTES)))
            some = list(islice(rows, DOCUMENTS_AT_ONCE))
            yield dict.fromkeys(name for row in some if isinstance(row, dict) for name in row)
            yield from chain(some, rows)
        except (pyarrow.ArrowException, csv.Error, ValueError, RecursionError) as error:
            why = " ".join(str(error).split())[:200]
            raise ValueError(f"{file} cannot be read ({why}): give a whole {_kind(file)[1:]} file of texts") from error


def _decoded(file: str, content: bytes, *, final: bool) -> str:
    """Return the text of a file, or of its beginning if not `final`.

    Raises:
        ValueError: if it is not text. Binary data would give many meaningless tokens.
    """
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content, final)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start}): save it as UTF-8, or "
            "narrow the pattern"
        ) from error
    if "\0" in text:
        raise ValueError(f"{file} is not text (NUL at character {text.index(chr(0))}): narrow the pattern")
    return text.replace("\r\n", "\n").replace("\r", "\n")


# Find text of the hub: files in its copy under `LOSSYTP_DATA`, or downloaded ones.


TEXTS = {"shakespeare": "karpathy/tiny_shakespeare", "openwebtext": "Skylion007/openwebtext"}


def hub_text(name: str) -> str:
    """Return the pattern of the files that hold a text's training split.

    Args:
        name: one of `TEXTS`, or `owner/name` on the hub.

    Raises:
        ValueError: if the name is unknown, or there are no such files here and the hub gives none.
    """
    path = TEXTS.get(name, name)
    if path.count("/") != 1:
        check_known("dataset", name, (*TEXTS, "owner/name on the hub"))
    copy = Source(path=path).folder
    if copy is not None and copy.is_dir():
        return _pattern_in(copy, name)
    from huggingface_hub import snapshot_download

    with hub_or_its_cache():
        try:
            folder = snapshot_download(path, repo_type="dataset", revision=EXPORT, allow_patterns="*/train/*.parquet")
        except Exception as error:  # the hub's client raises many kinds
            where = f"in {DATA_VARIABLE}, at {copy}," if copy else f"in {DATA_VARIABLE}, which is not set,"
            raise ValueError(
                f"dataset = {name!r} is neither {where} nor available from the hub ({first_line(error)}): go online "
                f"once, or put its files there"
            ) from error
    return str(Path(folder) / "**" / "train" / "*.parquet")


def _pattern_in(folder: Path, name: str) -> str:
    """Return the pattern of a folder's training files, or of its only text file."""
    for pattern in ("**/train*.parquet", "**/train*.txt", "*.txt"):
        if any(folder.glob(pattern)):
            return str(folder / pattern)
    raise ValueError(f"dataset = {name!r}: {folder} holds no .parquet or .txt file: put one there")
