"""Test that pretraining stopped or killed anywhere, and resumed, equals an unbroken one."""

import signal
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet
import pytest

from lossytp.training import loop
from lossytp.training.loop import run
from lossytp.training.objectives import Pretraining
from lossytp.training.record import read_record
from tests.training.killed_runs import started
from tests.training.pretraining.tiny_runs import STEPS, assert_same, losses, stopped

pytestmark = pytest.mark.slow

WAYS = {
    "tp, both phases": {"tensor_parallel_size": 2, "reliable_gather": False, "dropout": 0.1},
    "own ddp": {"data_parallel_size": 2, "implementation": "custom"},
    "own fsdp": {"data_parallel_size": 2, "data_parallel_type": "fsdp", "implementation": "custom"},
}


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


def test_a_run_killed_and_resumed_equals_an_unbroken_one(pretrain, tmp_path):
    """SIGKILL comes first while a checkpoint is half written, then in the middle of a step, then before the record."""
    unbroken, broken = pretrain("unbroken"), pretrain("broken")
    for kill, after in ((("file", 6, 0), 3), (("step", 2, 0), 3), (("record", 0, 0), STEPS)):
        assert started(tmp_path, 1, kill, **broken.as_dict()) == [-signal.SIGKILL]
        assert kept(broken) == [after]
    assert_same(broken, run(broken), unbroken, run(unbroken))


@pytest.mark.parametrize(("way", "rank", "at_step"), [*zip(WAYS, (0, 1, 1), (5, 7, 4), strict=True)])
def test_a_run_of_which_one_process_is_killed_equals_an_unbroken_one(pretrain, tmp_path, way, rank, at_step):
    values = {**WAYS[way], "loss_rate": 0.1, "mtu_bytes": 200}
    unbroken, broken = pretrain("unbroken", **values), pretrain("broken", **values)
    assert -signal.SIGKILL in started(tmp_path, 2, ("step", at_step, rank), **broken.as_dict())
    for config in (broken, unbroken):
        assert started(tmp_path, 2, **config.as_dict()) == [0, 0]
    records = [read_record(Path(config.output.output_dir)) for config in (broken, unbroken)]
    assert records[0]["timing"]["resumed_behind_steps"] == [3 if at_step <= 6 else 6]
    assert records[0]["network"]["training"]["lost"] > 0
    assert_same(broken, records[0], unbroken, records[1])


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
    with pytest.raises(ValueError, match="total_steps"):
        run(config)


def test_a_finished_run_is_not_repeated_and_another_configuration_is_refused(pretrain, monkeypatch):
    record = run(pretrain())
    monkeypatch.setattr(loop, "Run", None)  # fails if it runs
    assert run(pretrain()) == record
    assert run(pretrain(threads=1, num_proc=2, eval_steps=5)) == record
    with pytest.raises(ValueError, match="learning_rate"):
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
    with pytest.raises(ValueError, match=r"has changed since .*record\.json"):
        run(finished)
    with pytest.raises(ValueError, match=r"has changed since .*step-3"):
        run(broken)
    for name in "01":
        Path(finished.data.data_glob.replace("*", name)).unlink()
    assert run(finished) == record, "a finished run is read without its text"


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors", "tokenizer.json"])
def test_a_users_files_are_refused_before_the_first_step_and_stay(pretrain, monkeypatch, name):
    config = pretrain()
    file = Path(config.output.output_dir) / name
    file.parent.mkdir()
    file.write_text("x")
    (file.parent / "thesis").touch()
    monkeypatch.setattr(loop, "Run", None)  # fails if it runs
    with pytest.raises(ValueError, match=rf"^{file} is in the way"):
        run(config)
    assert file.read_text() == "x"
    assert sorted(path.name for path in file.parent.iterdir()) == sorted([name, "thesis"])
