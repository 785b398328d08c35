"""Read the rows of a task: from the hub or its copy on disc, from files or from a list. Cache what takes seconds."""

import csv
import glob
import gzip
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
from filelock import FileLock

from lossytp.network.checks import refuse_if
from lossytp.network.losses import Stream
from lossytp.training.files import first_line, matching, saving, sync

if TYPE_CHECKING:
    from datasets import Dataset

# Cache data between runs, if it takes seconds to prepare and never changes.


def cache_folder() -> Path:
    """Return the user's cache folder for lossytp."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lossytp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}): set XDG_CACHE_HOME to another") from error
    return folder


def cached(name: str, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder that `build` filled for this `key`, now or in an earlier run.

    One process builds while others wait. A folder appears whole or not at all.
    """
    folder = cache_folder() / f"{name}-{_hash(key)}"
    with saving(folder, reads_too=True), FileLock(f"{folder}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                part = Path(scratch) / "part"
                part.mkdir()
                build(part)
                sync(part)
                part.rename(folder)
    return folder


def code_digest(module: str) -> str:
    """Return a hash of the module's source, for a cache key; "" for a module without a file, such as a notebook."""
    file = getattr(sys.modules[module], "__file__", None)
    return _hash(Path(file).read_text(encoding="utf-8")) if file else ""


def stamp(files: Sequence[Path]) -> str:
    """Return a hash of the files' names, sizes and times."""
    try:
        states = [(file.name, file.stat()) for file in files]
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read ({error.strerror}): give the path of a file") from error
    return _hash(repr([(name, state.st_size, state.st_mtime_ns) for name, state in states]))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# Go offline if the hub does not answer: its client would try for half a minute before it reads its cache.

HUB_TIMEOUT_S = 4.0


@contextmanager
def hub_or_its_cache() -> Iterator[bool]:
    """Go offline within the block if the hub does not answer, or must not be asked; yield whether it answers."""
    import datasets
    from huggingface_hub import constants

    _quiet()
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    answers = not any(before) and hub_answers()
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = not answers
    try:
        yield answers
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@lru_cache
def hub_answers() -> bool:
    """Return whether the hub answers. A process asks it once."""
    from huggingface_hub import constants, get_session

    answers: list[int] = []

    def ask() -> None:
        with suppress(Exception):  # any client's error: refused, timed out, or a proxy's
            answers.append(get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S).status_code)

    asking = threading.Thread(target=ask, daemon=True)  # waiting for a silent name server has no time limit
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return bool(answers)


def _quiet() -> None:
    """Keep the progress bars of `datasets` and the hub out of a log."""
    if not sys.stderr.isatty():
        import datasets
        from huggingface_hub.utils.tqdm import disable_progress_bars

        datasets.disable_progress_bars()
        disable_progress_bars()


# Read files of rows.

FORMATS = (".parquet", ".csv", ".json", ".jsonl")
BATCH_ROWS = 64
LONGEST_CELL = 2**31 - 1


def format_of(file: str | Path) -> str:
    """Return the ending of a file's name that tells its format, without the .gz of one that gzip packed."""
    return Path(str(file).lower().removesuffix(".gz")).suffix


def text_in(file: Path, *, encoding: str = "utf-8", newline: str | None = None) -> Any:
    """Open a file of text, which gzip may have packed."""
    opened = gzip.open if file.suffix.lower() == ".gz" else open
    return opened(file, "rt", encoding=encoding, newline=newline)


def rows_in(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of one of the `FORMATS`. Cells of a csv are text, or None if they are empty."""
    import pyarrow.parquet

    try:
        if format_of(file) == ".parquet":
            with pyarrow.parquet.ParquetFile(file) as parquet:
                for batch in parquet.iter_batches(BATCH_ROWS):
                    yield from batch.to_pylist()
            return
        with text_in(file, encoding="utf-8-sig", newline="") as lines:
            if format_of(file) == ".csv":
                csv.field_size_limit(LONGEST_CELL)
                table = csv.DictReader(lines, strict=True)
                for row in table:
                    if len(row) != len(table.fieldnames or ()) or None in row.values():
                        raise ValueError(f"line {table.line_num} has not one cell for each name of a column")
                    yield {name: cell or None for name, cell in row.items()}
                return
            filled = filter(str.strip, lines)
            first = next(filled, "")
            whole = first.lstrip().startswith("[")  # a list, not an object a line
            for row in json.loads("".join([first, *filled])) if whole else map(json.loads, chain([first], filled)):
                if not isinstance(row, dict):
                    raise ValueError(f"{str(row)[:80]} is not an object with named columns")
                yield row
    except (pyarrow.ArrowException, csv.Error, ValueError, OSError, EOFError, zlib.error, RecursionError) as error:
        raise _unreadable([file], error) from error


def _table(file: Path) -> Any:
    import pyarrow.parquet

    if format_of(file) == ".parquet":
        return pyarrow.parquet.ParquetFile(file).read()
    rows = list(rows_in(file))
    return pyarrow.table({name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))})


def _read(files: list[Path]) -> "Dataset":
    import datasets
    import pyarrow

    _quiet()
    try:
        whole = pyarrow.concat_tables(map(_table, files), promote_options="permissive")
    except (pyarrow.ArrowException, OSError, OverflowError, UnicodeError) as error:
        raise _unreadable(files, error) from error
    return datasets.Dataset(datasets.table.InMemoryTable(whole), fingerprint=stamp(files))


def _unreadable(files: Sequence[Path], error: Exception) -> ValueError:
    names, why = ", ".join(map(str, files)), first_line(error)[:200]
    return ValueError(f"{names} cannot be read ({why}): give whole files, in UTF-8, of columns of one type")


# Sources of a task's rows.

DATA_VARIABLE = "LOSSYTP_DATA"
EXPORT = "refs/convert/parquet"  # the hub's own parquet copy of every data set, even of those that are scripts
PART = "part"  # a column of the test rows of a source that `has_parts`: evaluation also scores each part
Split = Literal["train", "test"]
Row = Mapping[str, Any]


class RowSource(Protocol):
    """The interface of a task's source of rows."""

    def rows(self, split: Split) -> "Dataset":
        """Return all rows of the split."""

    def subset(self, split: Split) -> bool | None:
        """Return whether rows of the official split are missing; None if there is no official number of rows."""
        return None

    def fingerprint(self, split: Split) -> str:
        """Return text that changes if the rows change, but not if they move."""


@dataclass(frozen=True, kw_only=True)
class Source(RowSource):
    """A data set on the hub, or its copy under `$LOSSYTP_DATA`.

    The copy is a folder `<path>/<name>`, laid out like the hub's repository. The names of a split's files start with
    the name of the split.
    """

    path: str
    """Owner and name of the hub's repository."""
    name: str | None = None
    """Configuration, if the repository has several."""
    splits: Mapping[Split, str] = field(default_factory=lambda: {"train": "train", "test": "validation"})
    """The hub's names of the splits."""
    official_rows: Mapping[Split, int] = field(default_factory=dict)
    """Numbers of rows of the official splits; fewer rows are a subset."""

    def __str__(self) -> str:
        return f"data set {self.path}" + (f", {self.name}," if self.name else "")

    @property
    def folder(self) -> Path | None:
        """Return the folder of the copy under `$LOSSYTP_DATA`, which may not exist; None if the variable is not set."""
        data = os.environ.get(DATA_VARIABLE)
        return Path(data).expanduser() / self.path / (self.name or "") if data else None

    def rows(self, split: Split) -> "Dataset":
        files = self._files(split)
        return self._from_hub(self.splits[split]) if files is None else _read(files)

    def subset(self, split: Split) -> bool | None:
        return len(self.rows(split)) < self.official_rows[split] if split in self.official_rows else None

    def fingerprint(self, split: Split) -> str:
        files = self._files(split)
        return self.rows(split)._fingerprint if files is None else stamp(files)

    def _files(self, split: Split) -> list[Path] | None:
        """Return the split's files in the copy; None if there is no copy."""
        if self.folder is None or not self.folder.is_dir():
            return None
        name = re.compile(re.escape(self.splits[split]) + r"(?!\w).*")  # not validation_matched for validation
        for folder in (self.folder, self.folder / "data"):
            found = [file for file in sorted(folder.glob("*")) if file.suffix in FORMATS and name.match(file.name)]
            if found:
                return found
        what = f"no {', '.join(FORMATS)} file named {self.splits[split]}* in {self.folder}"
        raise ValueError(f"{self} has {what}: put one there, or unset {DATA_VARIABLE}")

    def _from_hub(self, split: str) -> "Dataset":
        import datasets

        with hub_or_its_cache() as answers:
            try:
                try:
                    return datasets.load_dataset(self.path, self.name, split=split)
                except (RuntimeError, ValueError) as error:
                    if answers and "scripts" not in str(error):  # `datasets` no longer runs scripts
                        raise
                    return datasets.load_dataset(self.path, data_dir=self.name, split=split, revision=EXPORT)
            except (OSError, ValueError, RuntimeError) as error:
                why = first_line(error) if answers else "it does not answer, or HF_HUB_OFFLINE forbids asking"
                where = f"in {DATA_VARIABLE} ({self.folder or 'not set'}) nor available from the hub ({why})"
                fix = f"go online once, or set {DATA_VARIABLE} to a folder that has {Path(self.path, self.name or '')}"
                raise ValueError(f"{self} is neither {where}: {fix}") from None


@dataclass(frozen=True, kw_only=True)
class Files(RowSource):
    """The user's own files: csv, json (one row per line, or a list), or parquet.

    `train` and `test` are each the path of a file, or a pattern such as ``reviews/train-*.parquet``.
    """

    train: str | os.PathLike[str]
    test: str | os.PathLike[str]
    folder: str | os.PathLike[str] | None = None
    """Where relative paths start; the working folder if None."""

    def __str__(self) -> str:
        return f"files {self.train} and {self.test}"

    def rows(self, split: Split) -> "Dataset":
        return _read(self.files(split))

    def fingerprint(self, split: Split) -> str:
        return stamp(self.files(split))

    def files(self, split: Split) -> list[Path]:
        """Return the split's files, sorted."""
        given, folder = os.path.expanduser(getattr(self, split)), Path(self.folder or ".").absolute()
        files = list(map(Path, matching(str(folder / given))))
        for file in files or ([] if glob.has_magic(given) else [Path(given)]):
            if format_of(file) not in FORMATS:
                raise ValueError(f"{split} = {str(file)!r} has an unknown format: give one of {', '.join(FORMATS)}")
        fault = f"is neither a file nor a pattern of any, relative to {folder}: put one there, or give another"
        refuse_if(not files, split, given, fault)
        return files


@dataclass(frozen=True, kw_only=True)
class Table(RowSource):
    """Rows that are already in memory."""

    train: Sequence[Row]
    test: Sequence[Row]

    def __str__(self) -> str:
        return "table"

    def rows(self, split: Split) -> "Dataset":
        import datasets

        return datasets.Dataset.from_list([dict(row) for row in getattr(self, split)])

    def fingerprint(self, split: Split) -> str:
        return _hash(repr([sorted(row.items()) for row in getattr(self, split)]))


def sample_indices(available: int, examples: int | None) -> np.ndarray:
    """Return the sorted indices of a fixed pseudo-random sample of `examples` out of `available`; all if None."""
    order = np.argsort(Stream(("sample",)).uniforms(available), kind="stable")
    return np.sort(order[:examples])


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A source that adds some of its training sentences to the official test rows.

    SST-2's training rows are sentences and their phrases. A sentence is whole if no other row contains it. Whole
    sentences are held out, and training loses every phrase that they contain. Texts are compared word for word: a
    phrase that differs by a comma stays. Test rows have a column `part`: "official" or "held_out".

    SST-2 keeps 17,579 of its 67,349 training rows if 5,000 of its 6,885 whole sentences are held out.
    """

    has_parts: ClassVar[bool] = True
    source: RowSource
    column: str
    """Column of the sentences and phrases."""
    sentences: int
    """Number of sentences to hold out."""

    def __str__(self) -> str:
        return f"{self.source} with {self.sentences} sentences held out"

    def rows(self, split: Split) -> "Dataset":
        """Return the remaining training rows, or the official test rows followed by those held out."""
        import datasets

        train = self.source.rows("train")
        holders = _holders(train[self.column])
        whole = np.array([row for row, held_in in enumerate(holders) if held_in == [row]])
        if len(whole) <= self.sentences:
            raise ValueError(f"{self.source} has {len(whole)} whole sentences: hold out fewer than {self.sentences}")
        draw = np.argsort(Stream(("held out",)).uniforms(len(whole)), kind="stable")[: self.sentences]
        chosen = np.sort(whole[draw])
        if split == "train":
            gone = set(chosen.tolist())
            return train.select([row for row, held_in in enumerate(holders) if gone.isdisjoint(held_in)])
        official = self.source.rows("test")
        parts = [
            rows.add_column(PART, [name] * len(rows)).select_columns([*official.column_names, PART])
            for name, rows in (("official", official), ("held_out", train.select(chosen)))
        ]
        return datasets.concatenate_datasets(parts)

    def subset(self, split: Split) -> bool | None:
        return self.source.subset(split)

    def fingerprint(self, split: Split) -> str:
        """Return a hash of both splits and this file: each split's rows depend on the other's."""
        parts = [self.source.fingerprint("train"), self.source.fingerprint("test"), self.column, str(self.sentences)]
        return _hash("\n".join([*parts, code_digest(__name__)]))


def _holders(texts: Sequence[str]) -> list[list[int]]:
    """Return, for each text, the rows of the whole texts that contain it word for word.

    A whole text has only its own row. Of equal texts, the first counts as whole.
    """
    padded = [f" {' '.join(text.split())} " for text in texts]
    whole_by_word: dict[str, list[int]] = defaultdict(list)
    holders: list[list[int]] = [[] for _ in texts]
    for row in sorted(range(len(padded)), key=lambda row: -len(padded[row])):  # longest first; equal texts in order
        words = set(padded[row].split())
        rarest = min((whole_by_word[word] for word in words), key=len, default=[])
        holders[row] = [other for other in rarest if padded[row] in padded[other]] or [row]
        if holders[row] == [row]:
            for word in words:
                whole_by_word[word].append(row)
    return holders
