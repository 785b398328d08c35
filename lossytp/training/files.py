"""Writing to disk: errors in one line, and files that survive a crash of the machine."""

import errno
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers raise no OSError


@contextmanager
def saving(path: Path, *, reads_too: bool = False) -> Iterator[None]:
    """Write within the block.

    Args:
        reads_too: whether the block also reads; then only a lack of room is an error of writing.

    Raises:
        ValueError: in one line, where the operating system refuses to write.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        cause = os_error(error)
        if cause is None or (reads_too and cause.errno not in NO_ROOM):
            raise
        fix = "make room" if cause.errno in NO_ROOM else "mend this"
        reason = cause.strerror or str(cause)
        raise ValueError(f"{path} cannot be written ({reason}): {fix}, and start the same command again") from error


def os_error(error: BaseException | None) -> OSError | None:
    """Return the operating system's error that led to `error`, or None where something else did."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        number = RUST_ERROR.search(str(error))
        if number is not None:
            return OSError(int(number[1]), os.strerror(int(number[1])))
        error = error.__cause__ or error.__context__
    return None


def sync(path: Path) -> None:
    """Wait until a file, or a folder's names and the files in it, are on the disk."""
    if path.is_dir():
        for inner in path.iterdir():
            sync(inner)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_whole(path: Path) -> None:
    """Read a file that `torch.save` wrote, and compare the checksums (CRC-32) that it holds of every tensor.

    `torch.load` does not compare them, so a flipped bit would go unnoticed.

    Raises:
        ValueError: where the file is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except FileNotFoundError:
        raise
    except Exception as error:  # which one depends on the bit
        raise ValueError(f"it is damaged: {error}") from error
    if damaged is not None:
        raise ValueError(f"it is damaged: the checksum of {damaged} is another")
