"""Where a task's rows come from: the hub or a copy of it on disc, files of one's own, or a list."""

import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from lossytp.network.streams import Stream
from lossytp.training.files import NO_ROOM, os_error, saving
from lossytp.training.tasks.cache import cache_folder

if TYPE_CHECKING:  # it takes seconds to import, and naming a task should not
    from datasets import Dataset

DATA_VARIABLE = "LOSSYTP_DATA"
FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
HUB_TIMEOUT_S = 4.0
ASK_HUB_AGAIN_AFTER_S = 60.0
EXPORT = "refs/convert/parquet"  # where the hub keeps its own parquet copy of every data set, scripts included
Split = Literal["train", "test"]
Row = Mapping[str, Any]


class RowSource(Protocol):
    """What a task needs of its source."""

    def rows(self, split: Split) -> "Dataset":
        """All rows of the split."""

    def subset(self, split: Split) -> bool | None:
        """Whether rows of the official split are missing; None where there is no official number."""

    def fingerprint(self, split: Split) -> str:
        """Another one where the rows are others; where they lie makes no difference."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set of the hub, or its copy under `$LOSSYTP_DATA`, laid out like the hub's repository.

    The copy is the folder `<path>/<name>` and its files are those that start with the split's name.
    """

    path: str
    """Owner and name of the hub's repository."""
    name: str | None = None
    """Configuration, in a repository that has several."""
    splits: Mapping[Split, str] = field(default_factory=lambda: {"train": "train", "test": "validation"})
    """What the hub calls them."""
    official_rows: Mapping[Split, int] = field(default_factory=dict)
    """Rows of the official splits: fewer are a subset."""

    def __str__(self) -> str:
        return f"data set {self.path}" + (f", {self.name}," if self.name else "")

    @property
    def folder(self) -> Path | None:
        """Where under `$LOSSYTP_DATA` it would be; None where the variable is not set."""
        data = os.environ.get(DATA_VARIABLE)
        return Path(data).expanduser() / self.path / (self.name or "") if data else None

    def rows(self, split: Split) -> "Dataset":
        """All rows of the split; ValueError where there is neither a copy on disc nor a hub."""
        return _read(self._files(split)) if self._on_disc() else self._from_hub(self.splits[split])

    def subset(self, split: Split) -> bool | None:
        """Whether rows of the official split are missing; None where there is no official number."""
        return len(self.rows(split)) < self.official_rows[split] if split in self.official_rows else None

    def fingerprint(self, split: Split) -> str:
        """Of the copy's file names, sizes and times, or what `datasets` has for the hub's rows."""
        return _stamp(self._files(split)) if self._on_disc() else self.rows(split)._fingerprint

    def _on_disc(self) -> bool:
        return self.folder is not None and self.folder.is_dir()

    def _files(self, split: Split) -> list[Path]:
        assert self.folder is not None
        name = re.compile(re.escape(self.splits[split]) + r"(?!\w).*")  # not validation_matched for validation
        for folder in (self.folder, self.folder / "data"):
            found = [file for file in sorted(folder.glob("*")) if file.suffix in FORMATS and name.match(file.name)]
            for file in found:
                if not file.is_file():
                    raise ValueError(f"{file} is a folder, or a link to nothing: put a file there, or delete it")
            if found:
                return found
        raise ValueError(
            f"{self} has no {', '.join(FORMATS)} file named {self.splits[split]}* in {self.folder}: "
            f"put one there, or unset {DATA_VARIABLE}"
        )

    def _from_hub(self, split: str) -> "Dataset":
        import datasets

        _quiet()
        silence = "HF_HUB_OFFLINE forbids asking: set it to 0" if _is_offline() else "which does not answer"
        with hub_or_its_cache() as answers:
            try:
                try:
                    return datasets.load_dataset(self.path, self.name, split=split)
                except (RuntimeError, ValueError) as error:
                    if answers and "scripts" not in str(error):  # which `datasets` runs no more
                        raise
                    return datasets.load_dataset(self.path, data_dir=self.name, split=split, revision=EXPORT)
            except (OSError, ValueError, RuntimeError) as error:
                why = " ".join(str(error).split())[:200] if answers else silence
                looked = f"which {_lacks(self.folder)}" if self.folder else "which is not set"
                raise ValueError(
                    f"{self} is neither in {DATA_VARIABLE}, {looked}, nor had from the hub ({why}): "
                    f"go online once, or set {DATA_VARIABLE} to a folder that has {Path(self.path, self.name or '')}"
                ) from None


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files of one's own: csv, json (a row a line, or a list), or parquet."""

    train: str | os.PathLike[str]
    test: str | os.PathLike[str]

    def __str__(self) -> str:
        return f"files {self.train} and {self.test}"

    def rows(self, split: Split) -> "Dataset":
        """All rows of the file; ValueError where it is missing or of a kind that is not read."""
        return _read([self._file(split)])

    def subset(self, split: Split) -> None:
        """There is no official number."""
        return

    def fingerprint(self, split: Split) -> str:
        """Of the file's name, size and time."""
        return _stamp([self._file(split)])

    def _file(self, split: Split) -> Path:
        file = Path(getattr(self, split)).expanduser()
        if file.suffix not in FORMATS:
            raise ValueError(f"{split} = {str(file)!r} is of no kind that is read: give one of {', '.join(FORMATS)}")
        if not file.is_file():
            raise ValueError(f"{split} = {str(file)!r} is no file, seen from {Path.cwd()}: give one that is")
        return file


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows that are already in memory."""

    train: Sequence[Row]
    test: Sequence[Row]

    def __str__(self) -> str:
        return "table"

    def rows(self, split: Split) -> "Dataset":
        """The rows."""
        import datasets

        return datasets.Dataset.from_list([dict(row) for row in getattr(self, split)])

    def subset(self, split: Split) -> None:
        """There is no official number."""
        return

    def fingerprint(self, split: Split) -> str:
        """Of the rows."""
        return _hash(repr([sorted(row.items()) for row in getattr(self, split)]))


def sample_indices(available: int, examples: int | None) -> np.ndarray:
    """Sorted indices of a fixed pseudo-random sample of `examples` out of `available`; of all when None."""
    order = np.argsort(Stream(("sample",)).uniforms(available), kind="stable")
    return np.sort(order[:examples])


def _read(files: list[Path]) -> "Dataset":
    import datasets
    import pyarrow

    _quiet()
    kinds = {FORMATS[file.suffix] for file in files}
    if len(kinds) > 1:
        raise ValueError(f"{files[0].parent} mixes {' and '.join(sorted(kinds))} files of a split: keep one kind")
    cache = cache_folder() / "rows"
    with saving(cache, reads_too=True):
        try:
            return datasets.load_dataset(
                kinds.pop(), data_files=list(map(str, files)), split="train", cache_dir=str(cache)
            )
        except (datasets.exceptions.DatasetGenerationError, ValueError, StopIteration, pyarrow.ArrowException) as error:
            cause = os_error(error)
            if cause is not None and cause.errno in NO_ROOM:
                raise
            why = " ".join(str(error.__cause__ or error).split())[:200] or "no rows"
            names = ", ".join(map(str, files))
            raise ValueError(
                f"{names} cannot be read ({why}): give UTF-8, and rows with the same columns throughout"
            ) from None


def _lacks(folder: Path) -> str:
    """What is missing on the way to the folder, below what the variable names."""
    data = Path(os.environ[DATA_VARIABLE]).expanduser()
    return f"has no folder {folder}" if data.is_dir() else f"is no folder, {data}"


def _stamp(files: list[Path]) -> str:
    return _hash(repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _quiet() -> None:
    """No progress bars into a log."""
    if not sys.stderr.isatty():
        import datasets
        from huggingface_hub.utils.tqdm import disable_progress_bars

        datasets.disable_progress_bars()
        disable_progress_bars()


@contextmanager
def hub_or_its_cache() -> Iterator[bool]:
    """Go offline where the hub does not answer: its client would try for half a minute, then read its cache.

    Yields whether it answers.
    """
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    answers = not _is_offline() and hub_answers()
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = not answers
    try:
        yield answers
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _is_offline() -> bool:
    import datasets
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE)


def hub_answers() -> bool:
    """Whether the hub answers at all, asked at most once in a minute."""
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
        with suppress(Exception):  # of whatever client: refused, timed out, a proxy's error
            answers.append(get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S).status_code)

    asking = threading.Thread(target=ask, daemon=True)  # a name server that is silent knows no time limit
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return bool(answers)
