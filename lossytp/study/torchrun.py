"""Train on several processes, from a notebook or a program."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lossytp.training.config import RunSettings, TrainConfig
from lossytp.training.record import read_record
from lossytp.training.settings import Settings

OWN_ERROR = re.compile(r"rank \d+: error: ")
CONSEQUENCE = "the connection to another process is lost"
ROOT_CAUSE = re.compile(r"Root Cause.*?rank +: (\d+).*?traceback : (?!To enable)([^\n]+)", re.DOTALL)


def torchrun(config: RunSettings, *, processes: int | None = None) -> dict[str, Any]:
    """Train on several processes of this machine; a finished run is not repeated. Progress goes to stderr.

    Args:
        config: the run's configuration.
        processes: number of processes; by default the product of the three parallel sizes.

    Returns:
        The run's record.

    Raises:
        ValueError: with the failing rank's own error, if the run fails.
    """
    from lossytp.training.folder import finished_record  # torch takes seconds to import

    done = finished_record(config)
    if done is not None:
        return done
    if processes is None:
        processes = config.num_ranks
    entry = ("-m", "lossytp.train" if isinstance(config, TrainConfig) else "lossytp.pretrain")
    shown = ("training:", "pretraining:", "evaluation:", config.task, "megatron-core")
    start(entry, config, processes, shown=shown)
    record = read_record(Path(config.output.output_dir))
    assert record is not None
    return record


def start(
    program: Sequence[str | Path], config: Settings, processes: int, *, shown: tuple[str, ...] = ("training:",)
) -> None:
    """Run a program on several processes of this machine, and wait for its end.

    Args:
        program: what torchrun starts, which reads `--config FILE`: a file, or "-m" and a module.
        config: its configuration.
        processes: number of processes.
        shown: beginnings of the lines that go to stderr; the others are not shown.

    Raises:
        ValueError: with the failing rank's own error, if the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"  # JSON is YAML
        file.write_text(json.dumps(config.as_dict()), encoding="utf-8")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [*launcher, *map(str, program), "--config", str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            try:
                lines = _pass_on(run, shown)
            finally:
                run.terminate()  # on an interrupt too; torchrun then ends its processes
    if run.returncode != 0:
        raise ValueError(_reason(lines))


def _pass_on(run: subprocess.Popen[str], passed: tuple[str, ...]) -> list[str]:
    """Return all lines that the run prints, and copy those that begin with `passed` to stderr."""
    assert run.stdout is not None
    lines = []
    for line in run.stdout:
        lines.append(line.rstrip())
        if line.startswith(passed):
            print(line, end="", file=sys.stderr, flush=True)
    return lines


def _reason(lines: list[str]) -> str:
    """Return the first error that no other rank caused; if there is none, torchrun's report of the first to end."""
    errors = [line for line in lines if OWN_ERROR.match(line)]
    own = [line for line in errors if CONSEQUENCE not in line]
    if own:
        return own[0]
    cause = ROOT_CAUSE.search("\n".join(lines))
    if cause:
        return f"rank {cause[1]}: error: {cause[2]}"
    said = [line for line in lines if line.strip("=- ")]
    return (errors or said[-1:] or ["torchrun said nothing"])[0]
