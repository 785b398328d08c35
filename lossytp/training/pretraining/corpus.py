"""Read running text for language modelling: documents in a fixed order."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet

STDLIB = "stdlib"
PARQUET = ".parquet"
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
    """Text files. A parquet file has a column `text` with one document a row; any other file is one document."""

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
        """Return the hash of the files' contents, in order.

        Raises:
            ValueError: if a file cannot be read.
        """
        digest = hashlib.sha256()
        for name in self.files:
            try:
                with open(name, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise ValueError(f"{name} cannot be read ({error.strerror}): give a readable file") from error
        return digest.hexdigest()

    def check(self) -> None:
        """Check every file before any is needed; of a parquet file only its metadata.

        Raises:
            ValueError: if a file cannot be read, or holds no text.
        """
        for file in self.files:
            if file.endswith(PARQUET):
                with _opened(file):
                    pass
            else:
                _text_in(file)

    def texts(self) -> Iterator[str]:
        """Yield all documents once."""
        for position, texts in self.documents():
            if position.epoch:
                return
            yield from texts

    def _texts(self, shard: int) -> Iterator[list[str]]:
        for texts in _texts(self.files[shard]):
            if self.split is not None and len(self.files) == 1 and not self.files[0].endswith(PARQUET):
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
    files = sorted(file for file in glob.glob(data_glob, recursive=True) if not os.path.isdir(file))
    if not files and os.path.isdir(data_glob):
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


def _texts(file: str) -> Iterator[list[str]]:
    if not file.endswith(PARQUET):
        yield [_text_in(file)]
        return
    with _opened(file) as table:
        for batch in table.iter_batches(DOCUMENTS_AT_ONCE, columns=["text"]):
            yield batch.column(0).to_pylist()


@contextmanager
def _opened(file: str) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Open a parquet file with a column `text`.

    Raises:
        ValueError: if there is no such column, or the file cannot be read, within the block too.
    """
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns = table.schema_arrow
            if "text" not in columns.names:
                raise ValueError(f"{file} has no column 'text', but {', '.join(columns.names)}: give a file with one")
            kind = columns.field("text").type
            of_values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if not any(is_text(of_values) for is_text in TEXT_TYPES):
                raise ValueError(f"{file} has {kind} in its column 'text': give text")
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"{file} cannot be read ({why}): give a whole parquet file") from error


def _text_in(file: str) -> str:
    """Return the file's text.

    Raises:
        ValueError: if the file is unreadable or not text. Binary data would give many meaningless tokens.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}): give a readable file") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start}): save it as UTF-8, or "
            "narrow the pattern"
        ) from error
    if "\0" in text:
        raise ValueError(f"{file} is not text (NUL at character {text.index(chr(0))}): narrow the pattern")
    return text
