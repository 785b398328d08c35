"""Read running text, document by document, from files, from the hub or from Python's own sources."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from lossytp.network.checks import check_known, printable, shown
from lossytp.training.files import first_line, matching
from lossytp.training.rows import (
    DATA_VARIABLE,
    EXPORT,
    FORMATS,
    Source,
    cached,
    format_of,
    hub_or_its_cache,
    rows_in,
    stamp,
    text_in,
)

STDLIB = "stdlib"
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
    """Text files, which gzip may have packed.

    A table (parquet, csv, json) has a column `text` with one document a row. Any other file is one document.
    """

    files: tuple[str, ...]
    split: str | None = None
    """Which documents to read: "validation" for a few, chosen by a hash of their text, "train" for the others, None
    for all. Of a single file that is one document, "validation" is the end."""

    def documents(self, start: Position = BEGINNING) -> Iterator[tuple[Position, list[str]]]:
        """Yield lists of documents from `start` on, endlessly, each with the position after it."""
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
        """Return the hash of the files' contents, in order. It is kept until a file changes."""
        files = [Path(name) for name in self.files]

        def keep(folder: Path) -> None:
            digest = hashlib.sha256()
            for each in files:
                with each.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            (folder / "sha256").write_text(digest.hexdigest())

        return (cached("sha256", stamp(files), keep) / "sha256").read_text()

    def check(self) -> None:
        """Raise ValueError if a text file cannot be read, or the first rows of a table have no column `text`."""
        for file in self.files:
            next(_texts(file), None)

    def texts(self) -> Iterator[str]:
        """Yield all documents once."""
        for position, texts in self.documents():
            if position.epoch:
                return
            yield from texts

    def _texts(self, shard: int) -> Iterator[list[str]]:
        file = self.files[shard]
        for texts in _texts(file):
            if self.split is not None and len(self.files) == 1 and format_of(file) not in FORMATS:
                (text,) = texts
                end = round(len(text) * (1 - HELD_OUT_END))
                texts = [text[end:] if self.split == "validation" else text[:end]]
            elif self.split is not None:
                texts = [text for text in texts if _held_out(text) == (self.split == "validation")]
            yield [text for text in texts if text]

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
    """
    if data_glob == STDLIB:
        root, wanted = Path(sysconfig.get_paths()["stdlib"]), split == "validation"
        found = sorted(file for file in _python_files(root) if _held_out(str(file.relative_to(root))) == wanted)
        return Corpus(tuple(map(str, found)))
    files = matching(data_glob)
    if not files:
        raise ValueError(f"no file matches {data_glob!r}: give another pattern, as 'FOLDER/*.parquet', or 'stdlib'")
    return Corpus(tuple(files), split if splits_files else None)


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "test")]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _held_out(text: str) -> bool:
    return int(hashlib.blake2b(text.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def _texts(file: str) -> Iterator[list[str]]:
    """Yield the documents of a file, and "" for a row without text."""
    if format_of(file) not in FORMATS:
        try:
            with text_in(Path(file)) as stream:
                text = stream.read()
            if "\0" in text:  # binary data would give many meaningless tokens
                raise ValueError(f"NUL at character {text.index(chr(0))}")
        except (OSError, ValueError, EOFError) as error:
            what = f"{file} cannot be read as UTF-8 text ({first_line(error)})"
            raise ValueError(f"{what}: narrow the pattern") from error
        yield [text]
        return
    rows = rows_in(Path(file))
    some = list(islice(rows, DOCUMENTS_AT_ONCE))
    if not any("text" in row for row in some):
        others = printable(", ".join(some[0] if some else ())) or "none"
        raise ValueError(f"{file} has no column 'text', but {others}: give a file with one")
    while some:
        for row in some:
            if not isinstance(row.get("text"), str | None):
                raise ValueError(f"{file} has a row whose 'text' is no text, {shown(row)}: give text")
        yield [(row.get("text") or "").encode(errors="replace").decode() for row in some]  # JSON has half characters
        some = list(islice(rows, DOCUMENTS_AT_ONCE))


# Find text of the hub: files in its copy under `LOSSYTP_DATA`, or downloaded ones.


TEXTS = {"shakespeare": "karpathy/tiny_shakespeare", "openwebtext": "Skylion007/openwebtext"}


def hub_text(name: str) -> str:
    """Return the pattern of the files that hold a text's training split.

    Args:
        name: one of `TEXTS`, or `owner/name` on the hub.
    """
    path = TEXTS.get(name, name)
    if path.count("/") != 1:
        check_known("dataset", name, (*TEXTS, "owner/name on the hub"))
    copy = Source(path=path).folder
    if copy is not None and copy.is_dir():
        for pattern in ("**/train*.parquet", "**/train*.txt", "*.txt"):
            if any(copy.glob(pattern)):
                return str(copy / pattern)
        raise ValueError(f"dataset = {name!r}: {copy} holds no .parquet or .txt file: put one there")
    from huggingface_hub import snapshot_download

    with hub_or_its_cache():
        try:
            folder = snapshot_download(path, repo_type="dataset", revision=EXPORT, allow_patterns="*/train/*.parquet")
        except Exception as error:  # the hub's client raises many kinds
            where = f"in {DATA_VARIABLE} ({copy or 'not set'}) nor available from the hub ({first_line(error)})"
            raise ValueError(f"dataset = {name!r} is neither {where}: go online, or put its files there") from error
    return str(Path(folder) / "**" / "train" / "*.parquet")
