"""Which files in a user's folder are this program's: it never deletes or overwrites any other.

A hidden mark in the folder lists the names of the program's files as patterns. The program writes the mark before any
of these files and deletes it after all of them, so a killed run leaves files that the next run knows as its own.
"""

import contextlib
import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from lossytp.training.record import write_atomically

MARK = ".lossytp.json"
PART = re.compile(r"\.(.+)\.\d+")  # what `write_atomically` leaves of a file when it is killed


def is_marked(folder: Path) -> bool:
    """Return whether this program marked the folder."""
    return (folder / MARK).is_file()


def mark(folder: Path, patterns: Iterable[str]) -> None:
    """Make the folder, and declare files of these names in it to be this program's."""
    write_atomically(folder / MARK, json.dumps({"files": sorted(patterns)}))


def others(folder: Path) -> list[Path]:
    """Return what this program did not write: paths in the folder, or the folder itself where it is none."""
    if not folder.is_dir():
        return [folder] if folder.exists() or folder.is_symlink() else []
    patterns = _patterns(folder)
    return sorted(path for path in folder.iterdir() if path.is_dir() or not _matches(path.name, patterns))


def refuse(paths: list[Path]) -> None:
    """Raise ValueError where there is one of these paths."""
    if paths:
        more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
        raise ValueError(
            f"{paths[0]}{more} is in the way, and this program did not write it: move it elsewhere, or name another "
            "output_dir"
        )


def claim(folder: Path, patterns: Iterable[str]) -> None:
    """Mark a folder that is new, empty, or marked already.

    Raises:
        ValueError: where a folder without a mark holds something.
    """
    if not is_marked(folder):
        refuse(others(folder))
        mark(folder, patterns)


def claim_files(folder: Path, patterns: Iterable[str]) -> None:
    """Mark files of these names in a folder that may hold others' files beside them.

    Raises:
        ValueError: where a file of such a name is there and no mark.
    """
    patterns = list(patterns)
    if not is_marked(folder):
        refuse([path for path in others(folder) if _matches(path.name, patterns)])
        mark(folder, patterns)


def remove(folder: Path) -> None:
    """Delete this program's files in a marked folder, and the folder where nothing else is in it.

    Several processes may do so at once.
    """
    if not folder.is_dir():
        return
    kept = others(folder)
    for path in list(folder.iterdir()):
        if path not in kept and path.name != MARK:
            path.unlink(missing_ok=True)
    (folder / MARK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others' files are in it, or it is a link
        folder.rmdir()


def remove_parts(folder: Path, names: Iterable[str]) -> None:
    """Delete what killed runs left half written of files of these names. No other run may be at work in the folder."""
    patterns = [*names, MARK]
    for path in list(folder.iterdir()):
        part = PART.fullmatch(path.name)
        if part is not None and path.is_file() and _matches(part[1], patterns):
            path.unlink(missing_ok=True)


def _patterns(folder: Path) -> list[str]:
    try:
        listed = json.loads((folder / MARK).read_text(encoding="utf-8"))["files"]
        return [pattern for pattern in listed if isinstance(pattern, str)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MARK} is damaged: delete {folder}, or name another output_dir") from error


def _matches(name: str, patterns: list[str]) -> bool:
    part = PART.fullmatch(name)
    names = (name, part[1]) if part is not None else (name,)
    return any(fnmatchcase(each, pattern) for each in names for pattern in (*patterns, MARK))
