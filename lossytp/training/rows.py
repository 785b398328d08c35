"""Read the rows of a task: from the hub or its copy on disc, from files or from a list."""

import glob
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
from filelock import FileLock

from lossytp.network.bounded_files import check_file, content_of, parquet_in
from lossytp.network.losses import Stream
from lossytp.training.files import matching, saving, sync

if TYPE_CHECKING:
    from datasets import Dataset


# Cache data between runs, if it takes seconds to prepare and never changes.


SUMS = "SHA256SUMS.json"


def cache_folder() -> Path:
    """Return the user's cache folder for lossytp, or a folder under the temporary folder if that cannot be written.

    Raises:
        ValueError: if other users could write the folder under the temporary folder.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lossytp"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass  # a read-only or missing home is ordinary on clusters
    folder = Path(tempfile.gettempdir()) / f"lossytp-{os.getuid()}"
    with saving(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()  # another user may have made a folder or a link of this name first
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError(f"{folder} can be written by other users: set XDG_CACHE_HOME to a folder of your own")
    return folder


def cached(name: str, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder that `build` filled for this `key`, now or in an earlier run.

    One process builds while others wait. A folder appears whole or not at all. A damaged folder is rebuilt.

    Raises:
        ValueError: if the cache cannot be written.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    folder = cache_folder() / f"{name}-{digest}"
    with FileLock(f"{folder}.lock"):
        if not _is_whole(folder):
            with saving(folder, reads_too=True), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                part = Path(scratch) / "part"
                part.mkdir()
                build(part)
                (part / SUMS).write_text(json.dumps(_sums(part)), encoding="utf-8")
                sync(part)
                if folder.exists():
                    folder.rename(Path(scratch) / "damaged")
                part.rename(folder)
    return folder


def _is_whole(folder: Path) -> bool:
    """Return whether the folder exists and its files match their checksums."""
    try:
        expected = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        return bool(expected == _sums(folder))
    except (OSError, ValueError):
        return False


def _sums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    sums = {}
    for path in files:
        with path.open("rb") as file:
            sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def code_digest(module: str) -> str:
    """Return a hash of the module's source, for a cache key; "" for a module without a file, such as a notebook."""
    file = getattr(sys.modules[module], "__file__", None)
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest() if file else ""


def identity(value: Any) -> str:
    """Return text that identifies a value, or a function by its code, for a cache key."""
    if not callable(value):
        return repr(value)
    from datasets.fingerprint import Hasher  # hashes a notebook's function by its code, a module's only by its name

    return f"{Hasher.hash(value)} {code_digest(value.__module__)}"


# Ask at most once a minute whether the hub answers, and go offline if not.


HUB_TIMEOUT_S = 4.0
ASK_HUB_AGAIN_AFTER_S = 60.0


@contextmanager
def hub_or_its_cache() -> Iterator[bool]:
    """Go offline within the block if the hub does not answer; yield whether it answers.

    Online, the hub's client would try for half a minute before it reads its cache.
    """
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    answers = not is_offline() and hub_answers()
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = not answers
    try:
        yield answers
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def is_offline() -> bool:
    """Return whether the user's environment forbids asking the hub."""
    import datasets
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE)


def hub_answers() -> bool:
    """Return whether the hub answers. Ask it at most once a minute."""
    if _HUB.answers is None or time.monotonic() - _HUB.asked_at_s > ASK_HUB_AGAIN_AFTER_S:
        _HUB.answers, _HUB.asked_at_s = _ask_hub(), time.monotonic()
    return _HUB.answers


@dataclass
class _Hub:
    answers: bool | None = None  # None until asked
    asked_at_s: float = 0.0


_HUB = _Hub()


def _ask_hub() -> bool:
    from huggingface_hub import constants, get_session

    answers: list[int] = []

    def ask() -> None:
        with suppress(Exception):  # any client's error: refused, timed out, or a proxy's
            answers.append(get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S).status_code)

    asking = threading.Thread(target=ask, daemon=True)  # waiting for a silent name server has no time limit
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return bool(answers)


DATA_VARIABLE = "LOSSYTP_DATA"
FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
EXPORT = "refs/convert/parquet"  # the hub's own parquet copy of every data set, even of those that are scripts
PART = "part"  # a column of the test rows of a source that `has_parts`: evaluation also scores each part
MOST_BYTES = 2**31  # of a file's rows, once they are unpacked
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
    texts: tuple[str, ...] = ()
    """Columns that are text even in a csv, where 01 would be the number 1. A task sets it."""

    def __str__(self) -> str:
        return f"data set {self.path}" + (f", {self.name}," if self.name else "")

    @property
    def folder(self) -> Path | None:
        """Return the folder of the copy under `$LOSSYTP_DATA`, which may not exist; None if the variable is not set."""
        data = os.environ.get(DATA_VARIABLE)
        return Path(data).expanduser() / self.path / (self.name or "") if data else None

    def rows(self, split: Split) -> "Dataset":
        """Return all rows of the split.

        Raises:
            ValueError: if there is no usable copy on disc, and the hub lacks the data set or does not answer.
        """
        return _read(self._files(split), self.texts) if self._on_disc() else self._from_hub(self.splits[split])

    def subset(self, split: Split) -> bool | None:
        """Return whether rows of the official split are missing; None if there is no official number of rows."""
        return len(self.rows(split)) < self.official_rows[split] if split in self.official_rows else None

    def fingerprint(self, split: Split) -> str:
        """Return a hash of the copy's file names, sizes and times, or `datasets`' fingerprint of the hub's rows."""
        return _stamp(self._files(split)) if self._on_disc() else self.rows(split)._fingerprint

    def _on_disc(self) -> bool:
        return self.folder is not None and self.folder.is_dir()

    def _files(self, split: Split) -> list[Path]:
        assert self.folder is not None
        name = re.compile(re.escape(self.splits[split]) + r"(?!\w).*")  # not validation_matched for validation
        for folder in (self.folder, self.folder / "data"):
            found = [file for file in sorted(folder.glob("*")) if file.suffix in FORMATS and name.match(file.name)]
            if found:
                return found
        raise ValueError(
            f"{self} has no {', '.join(FORMATS)} file named {self.splits[split]}* in {self.folder}: "
            f"put one there, or unset {DATA_VARIABLE}"
        )

    def _from_hub(self, split: str) -> "Dataset":
        import datasets

        _quiet()
        silence = "HF_HUB_OFFLINE forbids asking: set it to 0" if is_offline() else "which does not answer"
        with hub_or_its_cache() as answers:
            try:
                try:
                    return datasets.load_dataset(self.path, self.name, split=split)
                except (RuntimeError, ValueError) as error:
                    if answers and "scripts" not in str(error):  # `datasets` no longer runs scripts
                        raise
                    return datasets.load_dataset(self.path, data_dir=self.name, split=split, revision=EXPORT)
            except (OSError, ValueError, RuntimeError) as error:
                why = " ".join(str(error).split())[:200] if answers else silence
                looked = f"which has no folder {self.folder}" if self.folder else "which is not set"
                raise ValueError(
                    f"{self} is neither in {DATA_VARIABLE}, {looked}, nor available from the hub ({why}): "
                    f"go online once, or set {DATA_VARIABLE} to a folder that has {Path(self.path, self.name or '')}"
                ) from None


@dataclass(frozen=True, kw_only=True)
class Files(RowSource):
    """The user's own files: csv, json (one row per line, or a list), or parquet.

    `train` and `test` are each the path of a file, or a pattern such as "reviews/train-*.parquet".
    """

    train: str | os.PathLike[str]
    test: str | os.PathLike[str]
    folder: str | os.PathLike[str] | None = None
    """Where relative paths start; the working folder if None."""
    texts: tuple[str, ...] = ()
    """Columns that are text even in a csv, where 01 would be the number 1. A task sets it."""

    def __str__(self) -> str:
        return f"files {self.train} and {self.test}"

    def rows(self, split: Split) -> "Dataset":
        """Return all rows of the split's files.

        Raises:
            ValueError: if a file is missing, unreadable or of an unknown format.
        """
        return _read(self.files(split), self.texts)

    def fingerprint(self, split: Split) -> str:
        """Return a hash of the files' names, sizes and times."""
        return _stamp(self.files(split))

    def files(self, split: Split) -> list[Path]:
        """Return the split's files, sorted.

        Raises:
            ValueError: if there is none, or one is of an unknown format.
        """
        given, folder = os.path.expanduser(getattr(self, split)), Path(self.folder or ".")
        files = list(map(Path, matching(str(folder / given))))
        for file in files or ([] if glob.has_magic(given) else [Path(given)]):
            if file.suffix not in FORMATS:
                raise ValueError(f"{split} = {str(file)!r} has an unknown format: give one of {', '.join(FORMATS)}")
        if not files:
            fix = "put one there, or give --dataset a file that declares where it is"
            if self.folder is None:
                fix = "give the path of a file, or a pattern, such as 'train-*.csv'"
            raise ValueError(
                f"{split} = {given!r} is neither a file nor a pattern that matches one, relative to "
                f"{folder.absolute()}: {fix}"
            )
        return files


@dataclass(frozen=True, kw_only=True)
class Table(RowSource):
    """Rows that are already in memory."""

    train: Sequence[Row]
    test: Sequence[Row]

    def __str__(self) -> str:
        return "table"

    def rows(self, split: Split) -> "Dataset":
        """Return the rows."""
        import datasets

        return datasets.Dataset.from_list([dict(row) for row in getattr(self, split)])

    def fingerprint(self, split: Split) -> str:
        """Return a hash of the rows."""
        return _hash(repr([sorted(row.items()) for row in getattr(self, split)]))


def sample_indices(available: int, examples: int | None) -> np.ndarray:
    """Return the sorted indices of a fixed pseudo-random sample of `examples` out of `available`; all if None."""
    order = np.argsort(Stream(("sample",)).uniforms(available), kind="stable")
    return np.sort(order[:examples])


def _read(files: list[Path], texts: tuple[str, ...]) -> "Dataset":
    import datasets
    import pyarrow

    _quiet()
    kinds = sorted({FORMATS[file.suffix] for file in files})
    if len(kinds) > 1:
        raise ValueError(f"{files[0].parent} mixes {' and '.join(kinds)} files of a split: keep one kind")
    read = parquet_in if kinds == ["parquet"] else content_of
    tables: list[Any] = [read(file, most_bytes=MOST_BYTES) for file in files]
    try:
        if kinds == ["json"]:
            tables = [_table_of_json(tables)]
        elif kinds == ["csv"]:
            tables = [_table_of_csv(content, texts) for content in tables]
        if len({frozenset(table.column_names) for table in tables}) > 1:
            raise ValueError("their columns differ")
        whole = pyarrow.concat_tables(tables, promote_options="permissive")
        return datasets.Dataset(datasets.table.InMemoryTable(whole), fingerprint=_stamp(files))
    except (ValueError, TypeError, OverflowError, RecursionError, pyarrow.ArrowException) as error:
        where, why = ", ".join(map(str, files)), " ".join(str(error).split())[:200]
        fix = "write the rows in UTF-8, all with the same columns of the same types"
        raise ValueError(f"{where} cannot be read ({why}): {fix}") from None


def _table_of_csv(content: bytes, texts: tuple[str, ...]) -> Any:
    """Return the rows of a csv, in which only an empty cell is null. The columns of `texts` are not read as numbers."""
    import pandas
    import pyarrow

    if b"\0" in content:
        raise ValueError("there are NUL bytes, which are not text")
    given: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
    # together, so that a first row with more fields than the header fails: it would shift the names of all columns
    names = pandas.read_csv(BytesIO(content), header=None, nrows=2, dtype=str, **given).iloc[0].dropna()
    if names.duplicated().any():
        raise ValueError(f"two columns are named {names[names.duplicated()].iloc[0]}")
    frame = pandas.read_csv(BytesIO(content), dtype=dict.fromkeys(texts, str), low_memory=False, **given)
    return pyarrow.table({name: _column(column) for name, column in frame.items()})


def _table_of_json(contents: list[bytes]) -> Any:
    """Return the objects of lists, or of one line each, as rows."""
    import pyarrow

    rows: list[dict[str, Any]] = []
    for content in contents:
        text = content.decode("utf-8-sig").strip()
        listed = text if text.startswith("[") else f"[{','.join(filter(str.strip, text.split(chr(10))))}]"
        rows += json.loads(listed, object_pairs_hook=_object)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a row is not an object with named columns")
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))}
    return pyarrow.table({name: _column(each) for name, each in columns.items()})


def _column(values: Any) -> Any:
    """Return a column as an array. Values of several types, or too large, become text, numbers as JSON writes them."""
    import pyarrow

    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError):
        texts = [each if isinstance(each, str | None) or each != each else json.dumps(each) for each in values]
        return pyarrow.array(texts, from_pandas=True)  # NaN, which differs from itself, is a csv's empty cell


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"a name is twice in one object, of {', '.join(dict(pairs))}")
    return dict(pairs)


def _stamp(files: list[Path]) -> str:
    found = [(file.name, check_file(file, MOST_BYTES)) for file in files]
    return _hash(repr([(name, status.st_size, status.st_mtime_ns) for name, status in found]))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _quiet() -> None:
    """Keep the progress bars of `datasets` and the hub out of a log."""
    if not sys.stderr.isatty():
        import datasets
        from huggingface_hub.utils.tqdm import disable_progress_bars

        datasets.disable_progress_bars()
        disable_progress_bars()


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
        """Return the remaining training rows, or the official test rows followed by those held out.

        Raises:
            ValueError: if there are too few whole sentences.
        """
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
        return datasets.concatenate_datasets([rows.cast(parts[0].features) for rows in parts])

    def subset(self, split: Split) -> bool | None:
        """Return whether the source lacks rows of the official split; None if there is no official number."""
        return self.source.subset(split)

    def fingerprint(self, split: Split) -> str:
        """Return a hash of both splits and this file: each split's rows depend on the other's."""
        parts = [self.source.fingerprint("train"), self.source.fingerprint("test"), self.column, str(self.sentences)]
        return hashlib.blake2b("\n".join([*parts, Path(__file__).read_text()]).encode(), digest_size=8).hexdigest()


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
