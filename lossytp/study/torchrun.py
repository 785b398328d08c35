"""Training runs on several processes, from a notebook or a program."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lossytp.training.config import TrainConfig
from lossytp.training.record import read_record

OWN_ERROR = re.compile(r"rank \d+: error: ")
CONSEQUENCE = "the connection to another process is lost"
ROOT_CAUSE = re.compile(r"Root Cause.*?rank +: (\d+).*?traceback : (?!To enable)([^\n]+)", re.DOTALL)


def torchrun(config: TrainConfig, *, processes: int | None = None) -> dict[str, Any]:
    """Train as `config` says on several processes of this machine, and return the record; a finished run is not rerun.

    What the run says of its progress goes to stderr as it comes.

    Args:
        processes: one for each tensor-parallel rank of each replica and stage when left out.

    Raises ValueError, with the failing rank's own error, where it fails.
    """
    from lossytp.training.inputs import finished_record  # torch takes seconds to import

    done = finished_record(config)
    if done is not None:
        return done
    if processes is None:
        processes = config.tensor_parallel_size * config.data_parallel_size * config.pipeline_parallel_size
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"  # which is YAML
        file.write_text(json.dumps(config.as_dict()), encoding="utf-8")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [*launcher, "-m", "lossytp.train", "--config", str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            try:
                lines = _pass_on(run, ("training:", "evaluation:", config.dataset, "megatron-core"))
            finally:
                run.terminate()  # also where this is interrupted: torchrun ends its processes
    if run.returncode != 0:
        raise ValueError(_reason(lines))
    record = read_record(Path(config.output_dir))
    assert record is not None
    return record


def _pass_on(run: subprocess.Popen[str], passed: tuple[str, ...]) -> list[str]:
    """All lines of the run; those that begin so go on to stderr."""
    assert run.stdout is not None
    lines = []
    for line in run.stdout:
        lines.append(line.rstrip())
        if line.startswith(passed):
            print(line, end="", file=sys.stderr, flush=True)
    return lines


def _reason(lines: list[str]) -> str:
    """The first rank's error that is not the consequence of another's, or what torchrun knows of the first to end."""
    errors = [line for line in lines if OWN_ERROR.match(line)]
    own = [line for line in errors if CONSEQUENCE not in line]
    if own:
        return own[0]
    cause = ROOT_CAUSE.search("\n".join(lines))
    if cause:
        return f"rank {cause[1]}: error: {cause[2]}"
    said = [line for line in lines if line.strip("=- ")]
    return (errors or said[-1:] or ["torchrun said nothing"])[0]
