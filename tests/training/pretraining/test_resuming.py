"""Test that pretraining stopped or killed anywhere, and resumed, equals an unbroken one."""

import multiprocessing
import os
import signal
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lossytp.training import loop, models
from lossytp.training import text as blocks
from lossytp.training.config import PretrainConfig
from lossytp.training.engine import Engine
from lossytp.training.loop import run
from lossytp.training.objectives import Pretraining
from tests.training.checkpoint_contents import rewrite
from tests.training.pretraining.tiny_runs import STEPS, TINY, assert_same, losses, stopped


def kept(config):
    """Return the steps of a run's checkpoints."""
    return sorted(
        int(path.name.removeprefix("step-")) for path in Path(config.output.output_dir).glob("checkpoint/step-*")
    )


@pytest.mark.parametrize("at_step", [2, 4, STEPS])
@pytest.mark.parametrize("values", [{"streaming": False}, {"tensor_parallel_size": 2, "loss_rate": 0.2}], ids=str)
def test_a_run_stopped_before_any_step_and_resumed_equals_an_unbroken_one(pretrain, at_step, values):
    unbroken, broken = pretrain("unbroken", **values), pretrain("broken", **values)
    stopped(broken, at_step)
    assert kept(broken) == ([] if at_step <= 3 else [3] if at_step <= 6 else [6])
    assert_same(broken, run(broken), unbroken, run(unbroken))


def test_a_resumed_run_takes_no_batch_before_its_first_step(pretrain):
    config, batch = pretrain("broken"), Pretraining.batch
    stopped(config, 5)
    with patch.object(Pretraining, "batch", autospec=True, side_effect=batch) as taken:
        run(config)
    assert taken.call_count == STEPS - 3


def test_a_run_killed_and_resumed_equals_an_unbroken_one(pretrain):
    """SIGKILL comes first while a checkpoint is half written, then in the middle of a step, then before the record."""
    unbroken, broken = pretrain("unbroken"), pretrain("broken")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    for kill, after in ((("save", 6), 3), (("step", 2), 3), (("record", 0), STEPS)):
        process = context.Process(target=_killed, args=(broken.as_dict(), *kill))
        process.start()
        process.join(200)
        assert process.exitcode == -signal.SIGKILL
        assert kept(broken) == [after]
    assert_same(broken, run(broken), unbroken, run(unbroken))


def _killed(values, where, at_step):
    torch.set_num_threads(1)
    step, write_data = Engine.forward_backward, FileSystemWriter.write_data
    steps = []

    def end(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def stepped(self, *arguments):
        steps.append(1)
        loss = step(self, *arguments)
        if where == "step" and len(steps) == at_step:
            end()
        return loss

    def half(writer, plan, planner):
        written = write_data(writer, plan, planner)
        if where == "save" and len(steps) == at_step:
            file = Path(writer.path) / written.value()[0].storage_data.relative_path
            os.truncate(file, file.stat().st_size // 2)
            end()
        return written

    with (
        patch.dict(models.PRESETS, {"gpt2-nano": TINY}),
        patch.object(blocks, "SHUFFLED_BLOCKS", 30),
        patch.object(Engine, "forward_backward", stepped),
        patch.object(FileSystemWriter, "write_data", half),
        patch.object(loop, "write_record", end if where == "record" else loop.write_record),
    ):
        run(PretrainConfig(**values))


def test_a_finished_run_goes_on_for_more_steps_but_not_for_fewer(pretrain, monkeypatch):
    config = pretrain(schedule="constant")
    run(config)
    longer = pretrain(schedule="constant", total_steps=STEPS + 3)
    record = run(longer)
    assert record["timing"]["resumed_behind_steps"] == [STEPS]
    unbroken = pretrain("unbroken", schedule="constant", total_steps=STEPS + 3)
    assert losses(record) == losses(run(unbroken))
    monkeypatch.setattr(loop, "Run", None)  # fails if it runs
    assert run(longer) == record
    with pytest.raises(ValueError, match=r"holds a run with total_steps = \d+, not \d+: give another folder"):
        run(config)


def test_a_finished_run_is_not_repeated_and_another_configuration_is_refused(pretrain, monkeypatch):
    record = run(pretrain())
    monkeypatch.setattr(loop, "Run", None)  # fails if it runs
    assert run(pretrain()) == record
    assert run(pretrain(threads=1, num_proc=2, eval_steps=5)) == record
    with pytest.raises(ValueError, match=r"holds a run with learning_rate = \S+, not 0\.001: give another folder"):
        run(pretrain(learning_rate=1e-3))


def change_text(config):
    """Change one document of the training text."""
    file = Path(config.data.data_glob.replace("*", "1"))
    texts = pa.parquet.read_table(file)["text"].to_pylist()
    pa.parquet.write_table(pa.table({"text": [*texts[:-1], "nine"]}), file)


def test_text_that_has_changed_is_refused(pretrain):
    finished, broken = pretrain(), pretrain("broken")
    record = run(finished)
    stopped(broken, 5)
    change_text(finished)
    with pytest.raises(ValueError, match=r"the data of .*parquet has changed since .*record\.json was written: put"):
        run(finished)
    with pytest.raises(ValueError, match=r"the data of .*parquet has changed since .*step-3 was written: put"):
        run(broken)
    for name in "01":
        Path(finished.data_glob.replace("*", name)).unlink()
    assert run(finished) == record, "a finished run is read without its text"


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors", "tokenizer.json"])
def test_a_users_files_are_refused_before_the_first_step_and_stay(pretrain, monkeypatch, name):
    config = pretrain()
    file = Path(config.output.output_dir) / name
    file.parent.mkdir()
    file.write_text("x")
    (file.parent / "thesis").touch()
    monkeypatch.setattr(loop, "Run", None)  # fails if it runs
    with pytest.raises(ValueError, match=rf"^{file} is in the way.*: move it"):
        run(config)
    assert file.read_text() == "x"
    assert sorted(path.name for path in file.parent.iterdir()) == sorted([name, "thesis"])


def test_a_position_of_another_text_is_one_line(pretrain):
    config = pretrain()
    stopped(config, 5)
    folder = Path(config.output.output_dir) / "checkpoint" / "step-3"
    for position in ({"start": 3}, {}, None):
        rewrite(folder, lambda tensors, state, position=position: (tensors, {**state, "position": position}))
        with pytest.raises(ValueError, match=r"^.*step-3 does not belong .*: delete .*step-3 to start over$") as error:
            run(config)
        assert "\n" not in str(error.value)
