"""Read and write records. A finished run leaves one, `record.json`, in its output folder; it is written last."""

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lossytp.network import timing as transport
from lossytp.network.routes import Wire
from lossytp.network.timing import AllReduce, BestEffort, Channel, SelectiveRepeat, Transport, step_seconds
from lossytp.network.traces import Replay
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
    check_writable(config.output.output_dir)
    record = read_record(Path(config.output.output_dir))
    if record is None:
        return None
    kind = settings_class(record["config"])
    if not isinstance(config, kind):
        names = {TrainConfig: "lossytp.train", PretrainConfig: "lossytp.pretrain"}
        which = f"{names[kind]}, not of {names[type(config)]}"
        raise ValueError(f"output_dir = {config.output.output_dir!r} holds a run of {which}: give another folder")
    changed = config.differences(record["config"])
    if changed:
        raise ValueError(
            f"output_dir = {config.output.output_dir!r} holds a run with {config.compared(changed, record['config'])}: "
            "give another folder"
        )
    return record if record["config"] == config.result_settings() else None


def describe(config: NetworkSettings) -> dict[str, Any]:
    """Return the part of a record that is known before the run: configuration, seed, commit and environment."""
    folder = getattr(config, "task_folder", None)
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


# Simulate how long a training step would take on the link that a configuration describes.


SAMPLES = 20  # simulated steps, each with a few dozen collectives
MOST_LOST, MOST_LOSSES = 0.9, 2**27  # loss rate, and losses in all samples, above which timing takes minutes


def simulated_step_seconds(config: RunSettings, shape: Any, tokens: float, compute_s: float) -> float | None:
    """Return the expected seconds of a training step over the configured link.

    Messages that may lose packets are best-effort, with a deadline so late that only lost packets are missing. If sums
    return reliably, the other half of the messages is retransmitted until delivered, by ideal selective repeat.

    Args:
        config: the run's configuration.
        shape: the model's configuration, as in transformers.
        tokens: mean tokens of a step, padding included.
        compute_s: measured seconds of a step. With virtual ranks they hold the work of all ranks in one process; under
            torchrun they hold the real messages too.

    Returns:
        The seconds; None if no link is configured, and in these cases, which `lossytp.network.timing` does not cover:

        - data, pipeline or sequence parallelism, or a control;
        - an algorithm without a schedule, a repair that sends extra packets, or a recording of each link;
        - losses limited to a direction, module, layer range, phase or some links;
        - frozen blocks, or gradient checkpointing, which repeats forward messages;
        - a lossy all-reduce of the gradients of copies (a reliable one is not counted);
        - retransmission at a loss rate above `MOST_LOST`, or with more losses than `MOST_LOSSES`.
    """
    wiring, ranks, process = config.wiring(), config.network.tensor_parallel_size, config.network.process()
    algorithm = wiring.algorithm
    scope = (
        config.network.lossy_direction,
        config.network.lossy_module,
        config.network.lossy_layers,
        config.network.lossy_phase,
        config.network.lossy_links,
    )
    if (
        config.link_gbits is None
        or ranks == 1
        or config.parallelism.data_parallel_size * config.parallelism.pipeline_parallel_size > 1
        or config.network.sequence_parallel
        or config.network.control is not None
        or config.optimizer.unfreeze_last_layers is not None
        or config.optimizer.gradient_checkpointing
        or config.parallelism.replicated_gradients == "lossy"
        or any(value is not None for value in scope)
        or wiring.repair.sends_more
        or algorithm.schedule is None
        or isinstance(process, Replay)
    ):
        return None
    sent_again = config.network.reliable_gather and not algorithm.sum_reaches_all and process.loss_rate > 0
    if sent_again and process.loss_rate > MOST_LOST:
        return None
    path = transport.Path(
        bandwidth_bits_per_s=config.link_gbits * 1e9,
        round_trip_s=config.round_trip_us * 1e-6,
        wire=Wire(mtu_bytes=config.network.mtu_bytes),
    )
    computed = "bf16" if config.compute.bf16 or config.compute.fp16 else "fp32"
    microbatches, itemsize = config.microbatches, 4 if (config.network.wire_dtype or computed) == "fp32" else 2
    elements = max(1, round(tokens / microbatches)) * shape.hidden_size
    schedule, layers = algorithm.schedule, shape.num_hidden_layers * microbatches
    num_packets = schedule.num_packets(elements, itemsize, ranks, path.wire)
    transports: list[Transport] = [BestEffort.patient(num_packets, path)]
    if sent_again:
        packets = SAMPLES * 4 * layers * schedule.links(ranks) * schedule.messages(ranks) * num_packets
        if packets * process.loss_rate / (1 - process.loss_rate) > MOST_LOSSES:
            return None
        transports.append(SelectiveRepeat.prompt(path))
    seconds = [
        step_seconds(
            AllReduce(algorithm=config.network.algorithm, num_elements=elements, itemsize=itemsize, ranks=ranks),
            Channel(path=path, transport=transport, process=process),
            num_layers=layers,
            compute_s=compute_s,
            samples=SAMPLES,
            seed=config.network.seed,
        )
        for transport in transports
    ]
    return float(np.mean(seconds))
