"""Allow one run at a time in a folder: two would overwrite each other's checkpoints and record."""

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.replicas import on_rank_zero
from lossytp.training.files import check_writable
from lossytp.training.own_files import remove_parts

LOCK = ".lossytp.lock"
WRITTEN = (
    "record.json",
    "evaluation.json",
    "README.md",
    "wandb_id",
    "probe",
    "losses.parquet",
    "statistics.jsonl",
    "tolerance.json",
)


@contextmanager
def exclusive_run(output_dir: str, network: LossyNetwork | None = None) -> Iterator[None]:
    """Keep other runs out of the folder within the block. First delete partial files that killed runs left there.

    The lock is a hidden file in the folder. The operating system releases it when its process ends, even if killed.

    Args:
        output_dir: the folder; it is made if missing.
        network: connects the processes of the run, of which the first holds the lock. If None, this process holds it.

    Raises:
        ValueError: if another run is using the folder, or the folder cannot be written.
    """
    held: list[int] = []

    def take() -> None:
        check_writable(output_dir)
        handle = _lock(output_dir)
        held.append(handle)
        remove_parts(Path(output_dir), WRITTEN)

    if network is None:
        take()
    else:
        on_rank_zero(take, network)
    try:
        yield
    finally:
        for handle in held:
            (Path(output_dir) / LOCK).unlink(missing_ok=True)  # before others can take it
            os.close(handle)


def _lock(output_dir: str) -> int:
    """Return the open file that holds the lock.

    Raises:
        ValueError: if another process holds it, or the file cannot be opened.
    """
    path = Path(output_dir) / LOCK
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ValueError(
                f"output_dir = {output_dir!r} cannot be locked ({error.strerror}): give another folder"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(handle)
                raise ValueError(
                    f"output_dir = {output_dir!r} is in use by another run: wait until it ends, or give another folder"
                ) from None
            print(  # some network file systems have no locks
                f"output_dir = {output_dir!r} is on a file system without locks ({error.strerror}): do not start a "
                "second run in it",
                file=sys.stderr,
            )
            return handle
        if _is_at(path, handle):
            return handle
        os.close(handle)  # the run that held the lock has just deleted this file


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
