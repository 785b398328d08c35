"""Start runs in separate processes that kill themselves with SIGKILL at a chosen point, and can be resumed.

A fork server that has already imported everything starts them, so that starting one takes no seconds.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from lossytp.training import checkpoint, loop, models, text
from lossytp.training.checkpoint import FOLDER
from lossytp.training.config import PretrainConfig
from lossytp.training.engine import Engine
from lossytp.training.loop import run
from lossytp.training.record import read_record
from tests.ports import held_port
from tests.training.parallel_runs import comparable, settings, task_in
from tests.training.pretraining.tiny_runs import TINY

SECONDS_TO_END = 120
SECONDS_OTHERS_NEED = 1.0  # to write their files, and to continue if they wrongly could
GILBERT_ELLIOTT = {"loss_type": "g-e", "loss_rate": 0.2, "mean_burst_packets": 4.0}
RELIABLE = {"loss_type": "ber", "loss_rate": 0.0, "mean_burst_packets": None}
DDP: dict[str, Any] = {"data_parallel_size": 2}
FSDP: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_type": "fsdp"}
STEPS = {"max_steps": 6, "checkpoint_steps": 2, "eval_steps": 2, "eval_samples": 12}
Kill = tuple[str, int, int]  # where, at which of the process's own steps, on which rank


def started(folder: Path, processes: int, kill: Kill | None = None, **values: Any) -> list[int]:
    """Run on several processes, and return their exit codes by rank. If one fails, all others are killed.

    The run writes to the subfolder `run`, or to `output_dir`. With a `data_glob` it pretrains a tiny model.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    if "data_glob" not in values:
        values = {**GILBERT_ELLIOTT, **STEPS, "output_dir": str(folder / "run"), **values}
    with held_port() as port:
        common = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = []
        for rank in range(processes):
            variables = {"RANK": rank, "LOCAL_RANK": rank, **common} if processes > 1 else {}
            ranks.append(context.Process(target=_go, args=(rank, folder, values, variables, kill)))
            ranks[-1].start()
        waiting = list(ranks)
        while waiting:
            ended = wait([rank.sentinel for rank in waiting], SECONDS_TO_END)
            waiting = [rank for rank in waiting if rank.sentinel not in ended]
            if not ended or any(rank.exitcode for rank in ranks):
                for rank in waiting:
                    rank.kill()
        for rank in ranks:
            rank.join()
        return [rank.exitcode for rank in ranks]


def result(folder: Path, name: str = "run") -> dict[str, Any]:
    record = read_record(folder / name)
    assert record is not None
    return comparable(record)


def _go(rank: int, folder: Path, values: dict[str, Any], variables: dict[str, Any], kill: Kill | None) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if kill is not None and kill[2] == rank:
            stack.enter_context(_killed(kill[0], kill[1]))
        if "data_glob" in values:
            stack.enter_context(patch.dict(models.PRESETS, {"gpt2-nano": TINY}))
            stack.enter_context(patch.object(text, "SHUFFLED_BLOCKS", 30))
            run(PretrainConfig(**values))
        else:
            stack.enter_context(task_in(folder))
            run(settings(folder, **values))


@contextmanager
def _killed(where: str, at_step: int) -> Iterator[None]:
    """Kill this process at its `at_step`-th step ("step"), or at the next checkpoint.

    At a checkpoint it dies when it has written half its file ("file"), or on the first process before it writes the
    marker ("marker"), renames the folder ("folder"), or deletes older checkpoints ("moved"). It can also die just
    before it writes the record ("record").
    """
    forward_backward, write_atomically, sync = Engine.forward_backward, checkpoint.write_atomically, checkpoint.sync
    steps: list[int] = []

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def step(engine: Engine, *arguments: Any) -> float:
        steps.append(1)
        if where == "step" and len(steps) == at_step:
            end()
        return forward_backward(engine, *arguments)

    def write(path: Path, text: str) -> None:
        if where == "marker" and len(steps) >= at_step:
            end()
        write_atomically(path, text)

    def reach_disk(path: Path) -> None:
        now = "moved" if path.name == FOLDER else "file" if path.suffix == ".pt" else "folder"
        if where == now and len(steps) >= at_step:
            if now == "file":
                time.sleep(SECONDS_OTHERS_NEED)
                os.truncate(path, path.stat().st_size // 2)
            end()
        sync(path)

    with (
        patch.object(Engine, "forward_backward", step),
        patch.object(checkpoint, "write_atomically", write),
        patch.object(checkpoint, "sync", reach_disk),
        patch.object(loop, "write_record", (lambda *_: end()) if where == "record" else loop.write_record),
    ):
        yield
