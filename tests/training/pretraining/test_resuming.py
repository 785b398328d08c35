"""Test that pretraining stopped or killed anywhere, and resumed, equals an unbroken one."""

import multiprocessing
import os
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lossytp.training import models
from lossytp.training.config import PretrainConfig
from lossytp.training.pretraining import corpus as corpora
from lossytp.training.pretraining import run as pretraining
from lossytp.training.pretraining.folder import CHECKPOINT
from lossytp.training.pretraining.run import run
from tests.training.pretraining.tiny_runs import STEPS, TINY, assert_same, stopped


@pytest.mark.parametrize("at_step", [2, 4, STEPS])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_run_stopped_before_any_step_and_resumed_equals_an_unbroken_one(pretrain, at_step, streaming):
    unbroken, broken = pretrain("unbroken", streaming=streaming), pretrain("broken", streaming=streaming)
    stopped(broken, at_step)
    assert (Path(broken.output_dir) / CHECKPOINT).exists() == (at_step > 3)
    assert_same(broken, run(broken), unbroken, run(unbroken))


def test_a_run_killed_and_resumed_equals_an_unbroken_one(pretrain, tmp_path):
    """SIGKILL comes first while a checkpoint is half written, then in the middle of a step."""
    unbroken, broken = pretrain("unbroken"), pretrain("broken")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    for kill in (("save", 6), ("step", 5)):
        process = context.Process(target=_killed, args=(broken.as_dict(), *kill))
        process.start()
        process.join(200)
        assert process.exitcode == -signal.SIGKILL
    assert torch.load(Path(broken.output_dir) / CHECKPOINT)["losses"]
    assert_same(broken, run(broken), unbroken, run(unbroken))


def _killed(values, where, at_step):
    torch.set_num_threads(1)
    step, save = pretraining._Pretraining._step, torch.save
    steps = []

    def end():
        os.kill(os.getpid(), signal.SIGKILL)

    def stepped(self, number, pool):
        steps.append(number)
        loss = step(self, number, pool)
        if where == "step" and number == at_step:
            end()
        return loss

    def half(state, file):
        save(state, file)
        if where == "save" and steps[-1] == at_step:
            file.flush()
            os.truncate(file.name, file.tell() // 2)
            end()

    with (
        patch.dict(models.PRESETS, {"gpt2-nano": TINY}),
        patch.object(corpora, "SHUFFLED_BLOCKS", 30),
        patch.object(pretraining._Pretraining, "_step", stepped),
        patch.object(torch, "save", half),
    ):
        run(PretrainConfig(**values))


def test_it_resumes_from_a_file_or_the_newest_in_a_folder(pretrain, tmp_path):
    unbroken = pretrain("unbroken")
    expected = run(unbroken)
    stopped(pretrain("older"), 4)
    stopped(pretrain("both/newer"), 7)
    torch.save({}, tmp_path / "both" / "oldest.pt")
    os.utime(tmp_path / "both" / "oldest.pt", (0, 0))
    started = []
    step = pretraining._Pretraining._step
    for name, path, first in (
        ("from file", tmp_path / "older" / CHECKPOINT, 4),
        ("from folder", tmp_path / "both", 7),
    ):
        config = pretrain(name, checkpoint_path=str(path))
        with patch.object(
            pretraining._Pretraining, "_step", lambda self, n, pool: started.append(n) or step(self, n, pool)
        ):
            statistics = run(config)
        assert started.pop(0) == first
        started.clear()
        assert_same(config, statistics, unbroken, expected)


def test_the_tokenizer_of_a_run_without_a_checkpoint_is_not_used(pretrain, tmp_path):
    (tmp_path / "other.txt").write_text("quick brown foxes " * 50)
    stopped(pretrain(data_glob=str(tmp_path / "other.txt")), 1)
    assert run(pretrain())["curves"]["train_loss"] == run(pretrain("fresh"))["curves"]["train_loss"]
