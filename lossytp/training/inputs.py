"""Check the files that a run's result depends on, besides its configuration: its data, and a trace of packet losses."""

import hashlib
from typing import Any

import numpy as np

from lossytp.network.replay import Replay
from lossytp.network.trace import Trace
from lossytp.training.checkpoint_folder import first_weights, home
from lossytp.training.config import NetworkSettings, RunSettings
from lossytp.training.objectives import objective_of
from lossytp.training.record import RECORD, check_output_folder


def trace_sha256(config: NetworkSettings) -> str | None:
    """Return the hash of the recorded losses that the configuration replays; None if it replays none."""
    process = config.process()
    if isinstance(process, Replay):
        links = "".join(f"{link} {_sha256(trace)}\n" for link, trace in process.links)
        return hashlib.sha256(links.encode()).hexdigest()
    return _sha256(process) if isinstance(process, Trace) else None


def _sha256(trace: Trace) -> str:
    lost = np.asarray(trace.lost, dtype="<i8").tobytes()
    return hashlib.sha256(f"{trace.num_packets} ".encode() + lost).hexdigest()


def finished_record(config: RunSettings) -> dict[str, Any] | None:
    """Return the record of the same configuration and files, or None if the run is not yet done.

    A hash is not compared if an older record lacks it, or if the data is not on this machine.

    Raises:
        ValueError: if the folder holds the record of another configuration or of other files.
    """
    record = check_output_folder(config)
    if record is None:
        return None
    where = f"{config.output_dir}/{RECORD}"
    fix = f"put the old file back, give another output_dir, or delete {where} to run again"
    if record.get("trace_sha256") is not None:
        check_same_trace(config, record["trace_sha256"], where, fix)
    check_same_weights(config, record.get("first_weights"), where)
    data = record.get("data")
    if isinstance(data, dict) and data.get("sha256") is not None:
        try:
            now = objective_of(config).data_sha256(config)
        except ValueError:  # committed records are also read on machines without their data
            return record
        check_same_data(config, data["sha256"], now, where, fix)
    return record


def check_same_weights(config: RunSettings, then: dict[str, str] | None, where: str) -> None:
    """Raise ValueError if `checkpoint_path` names other weights than the run of `where` began from."""
    file = first_weights(home(config), config.checkpoint_path)
    if file is None:
        return
    with file.open("rb") as opened:
        now = hashlib.file_digest(opened, "sha256").hexdigest()
    if now != (then or {}).get("sha256"):
        raise ValueError(
            f"{where} is of a run that did not begin from {file}: name the file that it began from, leave "
            "checkpoint_path out, or give another output_dir"
        )


def check_same_trace(config: NetworkSettings, then: str | None, where: str, fix: str) -> None:
    """Raise ValueError if the trace's hash is no longer `then`, its value when `where` was written."""
    if trace_sha256(config) != then:
        raise ValueError(f"the file of {config.loss_type} has changed since {where} was written: {fix}")


def check_same_data(config: RunSettings, then: str, now: str, where: str, fix: str) -> None:
    """Raise ValueError if the data's hash `now` differs from `then`, its value when `where` was written."""
    if now != then:
        raise ValueError(f"the data of {config.task} has changed since {where} was written: {fix}")
