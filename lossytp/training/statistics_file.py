"""Write a run's numbers while it runs: a line of JSON for each step, and for each evaluation."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lossytp.training.files import saving, write_atomically
from lossytp.training.own_files import refuse

STATISTICS = "statistics.jsonl"
Key = tuple[int, str]  # a line's step, and what its names begin with: "train" or "eval"


class StatisticsFile:
    """Append lines to a file, each with its `step`.

    Each line is written at once, so a killed run leaves whole lines. A resumed run repeats none: lines after the step
    that it resumes from are dropped, and lines that are there already are not written again.

    Args:
        path: the file.
        done: the step that the run resumes from; 0 if it begins.

    Raises:
        ValueError: if the file cannot be written, or this program did not write it.
    """

    def __init__(self, path: Path, *, done: int = 0) -> None:
        kept = {key: line for key, line in written_lines(path).items() if key[0] <= done}
        self._path, self._kept = path, set(kept)
        write_atomically(path, "".join(f"{line}\n" for line in kept.values()))
        with saving(path):
            self._file = path.open("ab", buffering=0)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line, unless it is there."""
        if not values or _key(step, values) in self._kept:
            return
        line = json.dumps({"step": step, **values}, allow_nan=False).encode() + b"\n"
        with saving(self._path):
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def written_lines(path: Path) -> dict[Key, str]:
    """Return the whole lines of the file, by key; none if there is no file.

    Raises:
        ValueError: if it cannot be read, or has lines that this program did not write.
    """
    try:
        *lines, _ = path.read_text(encoding="utf-8").split("\n")  # a full disk may have cut the last line
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError):
        refuse([path])
    found = {}
    for line in lines:
        try:
            values = json.loads(line)
            found[_key(values.pop("step"), values)] = line
        except (ValueError, KeyError, TypeError, AttributeError):
            refuse([path])
    return found


def _key(step: int, values: Mapping[str, Any]) -> Key:
    return step, min(values).split("/")[0]
