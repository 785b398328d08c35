"""Read and write records. A finished run leaves one, `record.json`, in its output folder; it is written last."""

import hashlib
import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lossytp.network.traces import Trace
from lossytp.training.config import EvaluateConfig, PretrainConfig, RunSettings, TrainConfig, settings_class
from lossytp.training.files import check_writable, write_atomically
from lossytp.training.groups import NetworkSettings
from lossytp.training.settings import without_obsolete

RECORD = "record.json"
PROGRAMS: dict[type[RunSettings], str] = {TrainConfig: "lossytp.train", PretrainConfig: "lossytp.pretrain"}
NEWER = "newer_settings"  # of a record that was read: settings that it lacks


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the folder's record; raise ValueError if it has a number that JSON lacks, such as NaN."""
    write_atomically(folder / RECORD, json.dumps(record, indent=1, allow_nan=False) + "\n")


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the folder's record, or None if it has none.

    Settings keep the file's order, so that tables of old records do not change. Settings that an older record lacks
    follow with their defaults, which leave newer features off; `NEWER` lists their names.

    Raises:
        ValueError: if the file cannot be read, or is not a record.
    """
    file = folder / RECORD
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        kind = settings_class(record["config"])
        written, _ = kind.result_of(record["config"]), dict(record["final"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a record ({error!r}): delete it to run again") from error
    newer = {name: value for name, value in kind.result_of(kind.defaults()).items() if name not in written}
    record["config"] = written | newer
    if newer:
        record[NEWER] = list(newer)
    return record


def check_output_folder(config: RunSettings) -> dict[str, Any] | None:
    """Make the output folder; return the record of this configuration, or None if there is none, or one to continue.

    Raises:
        ValueError: if the folder cannot be written, or holds the record of another configuration.
    """
    folder = config.output.output_dir
    check_writable(folder)
    record = read_record(Path(folder))
    if record is None:
        return None
    kind, written = settings_class(record["config"]), record["config"]
    changed = config.differences(written) if isinstance(config, kind) else None
    if changed != []:
        what = f"with {config.compared(changed, written)}" if changed else f"of {PROGRAMS[kind]}"
        raise ValueError(f"output_dir = {folder!r} holds a run {what}: give another folder")
    return record if without_obsolete(written) == config.result_settings() else None


def describe(config: RunSettings | EvaluateConfig) -> dict[str, Any]:
    """Return the part of a record that is known before the run: configuration, seed, commit and environment."""
    folder = config.as_dict().get("task_folder")
    return {
        "config": config.result_settings(),
        **({"task_folder": folder} if folder else {}),
        "seed": config.network.seed,
        "commit": commit(),
        "environment": environment(),
    }


def environment() -> dict[str, str]:
    """Return the versions, processor, GPU and the processes' backend, on which the last digits of results depend."""
    import torch  # takes seconds, and readers of records need none

    from lossytp.parallel.backend import wrapped_backend

    found = {"python": platform.python_version(), "machine": platform.machine(), "processor": _processor()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    if (backend := wrapped_backend()) is not None:
        found["backend"] = backend
    return found | {name: version(name) for name in ("torch", "transformers", "numpy")}


def _processor() -> str:
    """Return the processor's name and generation. Two generations of one name may add numbers in different orders."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        entries = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return "{model name}, family {cpu family}, model {model}".format_map(entries)
    except (OSError, KeyError):  # not Linux, or a processor without these entries
        return platform.processor()


def commit() -> str | None:
    """Return the Git commit, with "+" if lossytp/ has changes; None outside a Git checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # another project's checkout may hold an installation
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "..") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


# A run's result depends on files, besides its configuration: its data, a trace of packet losses, first weights.


def trace_sha256(network: NetworkSettings) -> str | None:
    """Return the hash of the recorded losses that the network replays; None if it replays none."""
    trace = network.process()
    if not isinstance(trace, Trace):
        return None
    lost = np.asarray(trace.lost, dtype="<i8").tobytes()
    return hashlib.sha256(f"{trace.num_packets} ".encode() + lost).hexdigest()


def sha256_of(file: Path) -> str:
    """Return the hash of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def check_same_trace(network: NetworkSettings, then: str | None, where: str, fix: str) -> None:
    """Raise ValueError if the trace's hash is no longer `then`, its value when `where` was written."""
    if trace_sha256(network) != then:
        raise ValueError(f"the file of {network.loss_type} has changed since {where} was written: {fix}")


def check_inputs(
    config: RunSettings, then: dict[str, Any], data: str | None, weights: Path | None, where: Path, fix: str
) -> None:
    """Raise ValueError if a run's files have changed since `where`, a record or a checkpoint, was written.

    Args:
        config: the run's configuration.
        then: what `where` holds: the hashes "data" and "trace", and "first_weights", or None.
        data: the hash of the data now; None if it is not on this machine.
        weights: the file of weights to begin from, if any.
        where: the record or the checkpoint.
        fix: what the user can do.
    """
    if then["trace"] is not None:
        check_same_trace(config.network, then["trace"], str(where), fix)
    if data is not None and then["data"] is not None and data != then["data"]:
        raise ValueError(f"the data of {config.task} has changed since {where} was written: {fix}")
    if weights is not None and sha256_of(weights) != (then["first_weights"] or {}).get("sha256"):
        fix = "name the file that it began from, leave checkpoint_path out, or give another output_dir"
        raise ValueError(f"{where} is of a run that did not begin from {weights}: {fix}")
