"""Test that pretraining on two processes, one of them killed with SIGKILL at any step, resumes to the last digit."""

import multiprocessing
import os
import random
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lossytp.training import models
from lossytp.training import text as blocks
from lossytp.training.config import PretrainConfig
from lossytp.training.engine import Engine
from lossytp.training.loop import run
from lossytp.training.record import read_record
from tests.ports import held_port
from tests.training.pretraining.tiny_runs import STEPS, TINY, assert_same

WAYS = {
    "tp, both phases": {"tensor_parallel_size": 2, "reliable_gather": False, "dropout": 0.1},
    "own fsdp": {"data_parallel_size": 2, "data_parallel_type": "fsdp", "implementation": "custom"},
}


def started(config, kill=None):
    """Run on two processes and return their exit codes. Kill one at a step, (rank, step), and then the other."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with held_port() as port:
        ranks = [context.Process(target=_go, args=(config.as_dict(), rank, port, kill)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        if kill is not None:
            ranks[kill[0]].join(120)
            ranks[1 - kill[0]].kill()
        for rank in ranks:
            rank.join(120)
    return [rank.exitcode for rank in ranks]


def _go(values, rank, port, kill):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    step, steps = Engine.forward_backward, []

    def stepped(self, *arguments):
        steps.append(1)
        if kill == (rank, len(steps)):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *arguments)

    with (
        patch.dict(models.PRESETS, {"gpt2-nano": TINY}),
        patch.object(blocks, "SHUFFLED_BLOCKS", 30),
        patch.object(Engine, "forward_backward", stepped),
    ):
        run(PretrainConfig(**values))


@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_which_one_process_is_killed_equals_an_unbroken_one(pretrain, way):
    values = {**WAYS[way], "loss_rate": 0.1, "mtu_bytes": 200}
    unbroken, broken = pretrain("unbroken", **values), pretrain("broken", **values)
    at_step = random.randint(1, STEPS)
    assert -signal.SIGKILL in started(broken, (random.randint(0, 1), at_step))
    assert started(broken) == [0, 0]
    assert started(unbroken) == [0, 0]
    records = [read_record(Path(config.output.output_dir)) for config in (broken, unbroken)]
    assert records[0]["timing"]["resumed_behind_steps"] == ([] if at_step <= 3 else [3] if at_step <= 6 else [6])
    assert records[0]["network"]["training"]["lost"] > 0
    assert_same(broken, records[0], unbroken, records[1])
