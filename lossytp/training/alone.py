"""One run at a time in a folder: two would overwrite each other's checkpoints and record."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.replicas import agreed
from lossytp.training.tasks.cache import cache_folder


@contextmanager
def alone_in(output_dir: str, network: LossyNetwork | None = None) -> Iterator[None]:
    """Within the block no other run of this machine is at work in the folder; ValueError where one is before.

    The first of the processes that `network` connects holds the lock, or this process where there is none; it ends with
    that process, however it ends. It lies in the cache: results stay clean.
    """
    name = hashlib.blake2b(str(Path(output_dir).resolve()).encode(), digest_size=8).hexdigest()
    lock = FileLock(cache_folder() / "locks" / f"{name}.lock")

    def take() -> None:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"output_dir = {output_dir!r} is another run's that is still going on: wait for it, or name another"
            ) from None

    if network is None:
        take()
    else:
        agreed(take, network)
    try:
        yield
    finally:
        lock.release()
