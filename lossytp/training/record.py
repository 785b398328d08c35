"""Read and write records. A finished run leaves one, `record.json`, in its output folder; it is written last."""

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lossytp.training.config import NetworkSettings, PretrainConfig, RunSettings, TrainConfig, settings_class
from lossytp.training.files import check_writable, write_atomically

RECORD = "record.json"
NEWER = "newer_settings"  # of a record that was read: settings that it lacks


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the folder's record.

    Raises:
        ValueError: if the record has a number that JSON lacks, such as NaN, or cannot be written.
    """
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
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}): delete it to run again") from error
    if not isinstance(record, dict) or not all(isinstance(record.get(part), dict) for part in ("config", "final")):
        raise ValueError(f"{file} is not a record: delete it to run again")
    kind = settings_class(record["config"])
    written = kind.result_of(record["config"])
    newer = {name: value for name, value in kind.result_defaults().items() if name not in written}
    record["config"] = written | newer
    if newer:
        record[NEWER] = list(newer)
    return record


def check_output_folder(config: RunSettings) -> dict[str, Any] | None:
    """Make the output folder, and return the record of this configuration.

    Returns:
        None if the folder has no record, or that of a run that this one continues.

    Raises:
        ValueError: if the folder cannot be written, or holds the record of another configuration.
    """
    check_writable(config.output_dir)
    record = read_record(Path(config.output_dir))
    if record is None:
        return None
    kind = settings_class(record["config"])
    if not isinstance(config, kind):
        names = {TrainConfig: "lossytp.train", PretrainConfig: "lossytp.pretrain"}
        which = f"{names[kind]}, not of {names[type(config)]}"
        raise ValueError(f"output_dir = {config.output_dir!r} holds a run of {which}: give another folder")
    changed = config.differences(record["config"])
    if changed:
        raise ValueError(
            f"output_dir = {config.output_dir!r} holds a run with {config.compared(changed, record['config'])}: "
            "give another folder"
        )
    return record if record["config"] == config.result_settings() else None


def describe(config: NetworkSettings) -> dict[str, Any]:
    """Return the part of a record that is known before the run: configuration, seed, commit and environment."""
    folder = getattr(config, "task_folder", None)
    return {
        "config": config.result_settings(),
        **({"task_folder": folder} if folder else {}),
        "seed": config.seed,
        "commit": commit(),
        "environment": environment(),
    }


def environment() -> dict[str, str]:
    """Return the versions, processor, GPU and the processes' backend, on which the last digits of results depend."""
    import torch  # takes seconds, and readers of records need none

    from lossytp.parallel.initialize import wrapped_backend

    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        **gpu,
        **({"backend": backend} if (backend := wrapped_backend()) else {}),
        **{name: version(name) for name in ("torch", "transformers", "numpy")},
    }


def _processor() -> str:
    """Return the processor's name and generation. Two generations of one name may add numbers in different orders."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
        return "{model name}, family {cpu family}, model {model}".format_map(told)
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
