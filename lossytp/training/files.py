"""Write to disk: report errors in one line, and let files survive a crash of the machine."""

import errno
import glob
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
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
