"""The folder of a run: one run at a time writes to it, and a finished record in it is not made again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.group import Layout
from lossytp.parallel.replicas import on_rank_zero
from lossytp.training.checkpoint import Checkpoints, sources
from lossytp.training.config import RunSettings
from lossytp.training.files import check_writable
from lossytp.training.logs import check_logs
from lossytp.training.objectives import objective_of
from lossytp.training.record import RECORD, check_inputs, check_output_folder

LOCK = ".lossytp.lock"


@contextmanager
def open_run(
    config: RunSettings, layout: Layout, network: LossyNetwork
) -> Iterator[tuple[dict[str, Any] | None, Checkpoints]]:
    """Yield the record of a finished run of this configuration, or None, and the run's checkpoints.

    Within the block no other run can write to the folder.

    Raises:
        ValueError: if another run is using the folder, or it holds the user's files, or a run of another configuration.
    """
    with ExitStack() as locks:
        locks.enter_context(exclusive_run(config.output.output_dir, network))
        record = on_rank_zero(lambda: finished_record(config), network)
        checkpoints = Checkpoints(config, layout, network)
        if record is None:
            if checkpoints.folder.parent != Path(config.output.output_dir):
                locks.enter_context(exclusive_run(str(checkpoints.folder), network))
            on_rank_zero(lambda: objective_of(config).check_folder(config), network)
            on_rank_zero(lambda: check_logs(config), network)
        yield record, checkpoints


@contextmanager
def exclusive_run(output_dir: str, network: LossyNetwork | None = None) -> Iterator[None]:
    """Keep other runs out of the folder, which is made if missing, within the block; raise ValueError if one is in it.

    The lock is a hidden file in the folder. The operating system releases it when its process ends, even if killed. If
    `network` connects the processes of the run, the first of them holds the lock, else this process.
    """
    lock = FileLock(Path(output_dir) / LOCK, blocking=False)

    def take() -> None:
        check_writable(output_dir)
        try:
            lock.acquire()
        except (Timeout, OSError) as error:
            reason = "is in use by another run" if isinstance(error, Timeout) else f"cannot be locked ({error})"
            raise ValueError(f"output_dir = {output_dir!r} {reason}: wait until it ends, or give another") from None

    take() if network is None else on_rank_zero(take, network)
    try:
        yield
    finally:
        if lock.is_locked:
            Path(lock.lock_file).unlink(missing_ok=True)  # before others can take it
            lock.release()


def finished_record(config: RunSettings) -> dict[str, Any] | None:
    """Return the record of the same configuration and files, or None if the run is not yet done.

    A hash is not compared if an older record lacks it, or if the data is not on this machine.
    """
    record = check_output_folder(config)
    if record is None:
        return None
    data = record["data"].get("sha256") if isinstance(record.get("data"), dict) else None
    then = {"data": data, "trace": record.get("trace_sha256"), "first_weights": record.get("first_weights")}
    try:
        now = data and objective_of(config).data_sha256(config)
    except ValueError:  # committed records are also read on machines without their data
        now = None
    where = Path(config.output.output_dir) / RECORD
    fix = f"put the old file back, give another output_dir, or delete {where} to run again"
    check_inputs(config, then, now, sources(config).weights, where, fix)
    return record
