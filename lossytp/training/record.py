"""Records: what a finished run leaves behind, `record.json` in its output folder, written last and at once."""

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lossytp.training.config import NetworkSettings, TrainConfig
from lossytp.training.files import saving

RECORD = "record.json"
MOVES_NO_NUMBER = ("output_dir", "checkpoint_steps", "tensorboard", "wandb")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` holds all of it or does not change, also where the process is killed.

    Raises:
        ValueError: where it cannot be written, as on a full disk.
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


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the folder's record; ValueError for a number that JSON has not, such as NaN."""
    write_atomically(folder / RECORD, json.dumps(record, indent=1, allow_nan=False) + "\n")


def read_record(folder: Path) -> dict[str, Any] | None:
    """The finished run's record, or None where there is none; ValueError where the file is no record.

    Parameters that did not exist when it was written have their defaults: what they switch on was not there.
    """
    file = folder / RECORD
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}): delete it, and its run is done again") from error
    if not isinstance(record, dict) or not all(isinstance(record.get(part), dict) for part in ("config", "final")):
        raise ValueError(f"{file} is no record: delete it, and its run is done again")
    written = {name: value for name, value in record["config"].items() if name not in MOVES_NO_NUMBER}
    record["config"] = {**portable(TrainConfig()), **written}
    return record


def check_output_folder(config: TrainConfig) -> dict[str, Any] | None:
    """The record that is already there for this very configuration, else None after making sure of a place to write.

    ValueError where the folder cannot be written, or holds the record of another configuration.
    """
    check_writable(config.output_dir)
    record = read_record(Path(config.output_dir))
    if record is not None and record["config"] != portable(config):
        ours, theirs = portable(config), record["config"]
        changed = [name for name in {**ours, **theirs} if name not in ours or ours[name] != theirs[name]]
        raise ValueError(
            f"output_dir = {config.output_dir!r} holds a run with another {', '.join(changed)}: name another folder"
        )
    return record


def check_writable(output_dir: str) -> None:
    """Make the folder; ValueError where it cannot be written."""
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"output_dir = {output_dir!r} cannot be written ({error.strerror}): name another") from error


def portable(config: NetworkSettings) -> dict[str, Any]:
    """The configuration less what does not change the result and may differ from machine to machine."""
    return {name: value for name, value in config.as_dict().items() if name not in MOVES_NO_NUMBER}


def describe(config: NetworkSettings) -> dict[str, Any]:
    """The part of a record that is known before the run: configuration, seed, commit and environment."""
    return {
        "config": portable(config),
        "seed": config.seed,
        "commit": commit(),
        "environment": environment(),
    }


def environment() -> dict[str, str]:
    """The versions and the processor that a run's last digits depend on."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        **{name: version(name) for name in ("torch", "transformers", "numpy")},
    }


def _processor() -> str:
    """Name and generation: processors of one name and two generations sum in other orders."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
        return "{model name}, family {cpu family}, model {model}".format_map(told)
    except (OSError, KeyError):  # not Linux, or a processor that does not say
        return platform.processor()


def commit() -> str | None:
    """The commit this code is of, "+" behind it where the library differs from it; None outside a git checkout."""
    here = Path(__file__).parent.parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain", "."], cwd=here, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
