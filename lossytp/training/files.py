"""Write files so that they survive a crash, and tell this program's files from the user's own."""

import contextlib
import errno
import glob
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers raise no OSError


@contextmanager
def saving(path: Path, *, reads_too: bool = False) -> Iterator[None]:
    """Turn the operating system's errors within the block into a ValueError of one line.

    Args:
        path: what the block writes, for the message.
        reads_too: whether the block also reads. If so, only a full disk counts as a failure to write.

    Raises:
        ValueError: if the operating system refuses to write.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        cause = os_error(error)
        if cause is None or (reads_too and cause.errno not in NO_ROOM):
            raise
        fix = "make room" if cause.errno in NO_ROOM else "fix this"
        reason = cause.strerror or str(cause)
        raise ValueError(f"{path} cannot be written ({reason}): {fix}, then start the same command again") from error


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` either holds all of it or does not change, even if the process is killed.

    Raises:
        ValueError: if the operating system refuses to write, for example because the disk is full.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def matching(pattern: str) -> list[str]:
    """Return the files that a path or a pattern names, sorted. What exists as it is written is no pattern."""
    path = Path(os.path.expanduser(pattern))
    there = next(each for each in (path, *path.parents) if each == each.parent or os.path.exists(each))
    found = glob.glob(os.path.join(glob.escape(str(there)), *path.relative_to(there).parts), recursive=True)
    return sorted(str(Path(name)) for name in found if os.path.isfile(name) or not os.path.exists(name))


def check_writable(output_dir: str) -> None:
    """Make the folder.

    Raises:
        ValueError: if it cannot be made or written.
    """
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"output_dir = {output_dir!r} cannot be written ({error.strerror}): give another") from error


def os_error(error: BaseException | None) -> OSError | None:
    """Return the operating system's error that caused `error`, or None if something else did."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        number = RUST_ERROR.search(str(error))
        if number is not None:
            return OSError(int(number[1]), os.strerror(int(number[1])))
        error = error.__cause__ or error.__context__
    return None


def sync(path: Path) -> None:
    """Wait until a file is on the disk, or a folder with all files in it."""
    if path.is_dir():
        for inner in path.iterdir():
            sync(inner)
    sync_names(path)


def sync_names(path: Path) -> None:
    """Wait until a file is on the disk, or the names of the files in a folder, but not the files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def crc32_of(path: Path) -> int:
    """Return the checksum (CRC-32) of a file's contents.

    Raises:
        OSError: if it cannot be read.
    """
    crc = 0
    with path.open("rb") as file:
        while part := file.read(2**20):
            crc = zlib.crc32(part, crc)
    return crc


def first_line(error: Exception) -> str:
    """Return the first line of an error, and the second if the first ends with a colon."""
    first, *rest = f"{type(error).__name__}: {str(error).strip()}".splitlines()
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first


# Tell this program's files in a user's folder from all others, which it never deletes or overwrites.
#
# A hidden file in the folder, the mark, lists the names of the program's files as patterns. The program writes the mark
# before any of these files and deletes it after all of them. So the next run recognises what a killed run left behind.
# A folder within such a folder needs a mark of its own.


MARK = ".lossytp.json"
PART = re.compile(r"\.(.+)\.\d+")  # the partial file that `write_atomically` leaves if it is killed


def is_marked(folder: Path) -> bool:
    """Return whether this program marked the folder."""
    return (folder / MARK).is_file()


def mark(folder: Path, patterns: Iterable[str], run: str | None = None) -> None:
    """Make the folder, and declare that files of these names in it are this program's and, with `run`, that run's."""
    write_atomically(folder / MARK, json.dumps({"files": sorted(patterns), **({"run": run} if run else {})}))


def run_of(folder: Path) -> str | None:
    """Return the run that marked the folder; None if no run did."""
    try:
        run = json.loads((folder / MARK).read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return run if isinstance(run, str) else None


def others(folder: Path) -> list[Path]:
    """Return the paths in the folder that this program did not write; the path itself if it is not a folder."""
    try:
        paths = list(folder.iterdir())  # before the mark is read: another process may be writing both
    except FileNotFoundError:
        return [folder] if folder.is_symlink() else []
    except NotADirectoryError:
        return [folder]
    patterns = _patterns(folder)
    return sorted(path for path in paths if not (_matches(path.name, patterns) and _is_file_or_marked(path)))


def refuse(paths: list[Path]) -> None:
    """Raise ValueError if there are any such paths."""
    if paths:
        more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
        raise ValueError(
            f"{paths[0]}{more} is in the way, and this program did not write it: move it elsewhere, or give another "
            "output_dir"
        )


def claim(folder: Path, patterns: Iterable[str], run: str | None = None) -> None:
    """Mark a folder that is new, empty, or already marked.

    Args:
        folder: the folder.
        patterns: names of the program's files in it.
        run: the output folder of the run that alone may write there; None for any run.

    Raises:
        ValueError: if a folder without a mark is not empty.
    """
    if not is_marked(folder):
        refuse(others(folder))
        mark(folder, patterns, run)


def claim_files(folder: Path, patterns: Iterable[str]) -> None:
    """Mark files of these names in a folder that may also hold the user's files.

    Raises:
        ValueError: if a folder without a mark holds a file of such a name.
    """
    patterns = list(patterns)
    if not is_marked(folder):
        refuse([path for path in others(folder) if _matches(path.name, patterns)])
        mark(folder, patterns)


def remove(folder: Path) -> None:
    """Delete this program's files in a marked folder, and the folder itself if it is then empty.

    Several processes may do so at the same time.
    """
    if not folder.is_dir():
        return
    kept = others(folder)
    with contextlib.suppress(FileNotFoundError):  # another process has removed the folder
        for path in list(folder.iterdir()):
            if path not in kept and path.is_dir():
                remove(path)
            elif path not in kept and path.name != MARK:
                path.unlink(missing_ok=True)
    (folder / MARK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the user's files are in it, or it is a link
        folder.rmdir()


def remove_parts(folder: Path, names: Iterable[str]) -> None:
    """Delete partial files of these names that killed runs left. No other run may be using the folder."""
    patterns = [*names, MARK]
    for path in list(folder.iterdir()):
        part = PART.fullmatch(path.name)
        if part is not None and path.is_file() and _matches(part[1], patterns):
            path.unlink(missing_ok=True)


def _is_file_or_marked(path: Path) -> bool:
    return not path.is_dir() or (is_marked(path) and not path.is_symlink())


def _patterns(folder: Path) -> list[str]:
    try:
        listed = json.loads((folder / MARK).read_text(encoding="utf-8"))["files"]
        return [pattern for pattern in listed if isinstance(pattern, str)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MARK} is damaged: delete {folder}, or give another output_dir") from error


def _matches(name: str, patterns: list[str]) -> bool:
    part = PART.fullmatch(name)
    names = (name, part[1]) if part is not None else (name,)
    return any(fnmatchcase(each, pattern) for each in names for pattern in (*patterns, MARK))
