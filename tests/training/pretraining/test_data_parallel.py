"""Test pretraining on two processes by this project's DDP and FSDP: one process's curve and model."""

from unittest.mock import patch

import pytest

from lossytp.training import models
from lossytp.training import text as blocks
from lossytp.training.config import PretrainConfig
from lossytp.training.loop import run
from tests.training.pretraining.tiny_runs import TINY, assert_same, losses, stopped, weights

STEPS = 30


def on_rank_train(values, stop_at=None):
    """Run on this process, one of several, and interrupt it before a step, if one is given."""
    with patch.dict(models.PRESETS, {"gpt2-nano": TINY}), patch.object(blocks, "SHUFFLED_BLOCKS", 30):
        config = PretrainConfig(**values)
        return run(config) if stop_at is None else stopped(config, stop_at)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_replicas_train_as_one_process(pretrain, processes, kind):
    alone = pretrain("alone", total_steps=STEPS, eval_steps=15)
    together = pretrain(
        "together",
        total_steps=STEPS,
        eval_steps=15,
        data_parallel_size=2,
        data_parallel_type=kind,
        implementation="custom",
    )
    records, expected = processes(2, on_rank_train, together.as_dict()), run(alone)
    assert records[0]["processes"] == 2
    for record in records:
        assert losses(record) == pytest.approx(losses(expected), rel=1e-4)
        assert record["final"]["cross_entropy_clean"] == pytest.approx(
            expected["final"]["cross_entropy_clean"], rel=1e-4
        )
    mine, theirs = weights(together), weights(alone)
    assert max((mine[name] - theirs[name]).abs().max() for name in theirs) < 2**-6, "both are rounded to bfloat16"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_projects_own_resumes_to_the_last_bit(pretrain, processes, kind):
    values = {"data_parallel_size": 2, "data_parallel_type": kind, "implementation": "custom", "loss_rate": 0.1}
    unbroken, broken = (pretrain(name, total_steps=8, **values) for name in ("unbroken", "broken"))
    processes(2, on_rank_train, broken.as_dict(), 5)
    resumed = processes(2, on_rank_train, broken.as_dict())[0]
    assert resumed["timing"]["resumed_behind_steps"] == [3]
    assert resumed["network"]["training"]["lost"] > 0
    assert_same(broken, resumed, unbroken, processes(2, on_rank_train, unbroken.as_dict())[0])
