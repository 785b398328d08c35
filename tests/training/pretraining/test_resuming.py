"""Test that pretraining stopped or killed anywhere, and resumed, equals an unbroken one, and what it resumes from."""

import os
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from lossytp.parallel.group import Layout
from lossytp.training import loop
from lossytp.training.checkpoint import MARKER, Checkpoints, number_of, steps_in
from lossytp.training.folder import open_run
from lossytp.training.loop import run
from lossytp.training.models import build_language_model
from lossytp.training.record import read_record
from lossytp.training.text import tokenizer_for
from tests.training.killed_runs import started
from tests.training.pretraining.tiny_runs import STEPS, assert_same, losses, stopped

pytestmark = pytest.mark.slow

WAYS = {
    "tp, both phases": {"tensor_parallel_size": 2, "reliable_gather": False, "dropout": 0.1},
    "own ddp": {"data_parallel_size": 2, "implementation": "custom"},
    "own fsdp": {"data_parallel_size": 2, "data_parallel_type": "fsdp", "implementation": "custom"},
}


def steps(folder: Path) -> list[int]:
    return [number_of(path) for path in reversed(steps_in(folder))]


def kept(config):
    return steps(Path(config.output.output_dir) / "checkpoint")


@pytest.mark.parametrize("at_step", [2, 4, STEPS])
@pytest.mark.parametrize("values", [{"streaming": False}, {"tensor_parallel_size": 2, "loss_rate": 0.2}], ids=str)
def test_a_run_stopped_before_any_step_and_resumed_equals_an_unbroken_one(pretrain, at_step, values):
    unbroken, broken = pretrain("unbroken", **values), pretrain("broken", **values)
    stopped(broken, at_step)
    assert kept(broken) == ([] if at_step <= 3 else [3] if at_step <= 6 else [6])
    assert_same(broken, run(broken), unbroken, run(unbroken))


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
    assert run(longer) == run(longer.replace(threads=1, num_proc=2, eval_steps=5)) == record
    for other, name in ((config, "total_steps"), (longer.replace(learning_rate=1e-3), "learning_rate")):
        with pytest.raises(ValueError, match=name):
            run(other)


def change_text(config):
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


def test_it_resumes_from_a_file_or_the_newest_in_a_folder(pretrain, tmp_path):
    unbroken = pretrain("unbroken")
    expected = run(unbroken)
    stopped(pretrain("older"), 4)
    stopped(pretrain("newer", keep_checkpoints=2), 7)
    file = tmp_path / "older" / "checkpoint" / "step-3" / MARKER
    for name, path, step in (
        ("from file", file, 3),
        ("from run", tmp_path / "newer", 6),
        ("from folder", tmp_path / "newer" / "checkpoint", 6),
        ("from step", tmp_path / "newer" / "checkpoint" / "step-3", 3),
    ):
        config = pretrain(name, checkpoint_path=str(path))
        record = run(config)
        assert record["timing"]["resumed_behind_steps"] == [step]
        assert_same(config, record, unbroken, expected)
    for path in ("gone.pth", "older/checkpoint/step-9", "data", "data/train-0.parquet"):
        with pytest.raises(ValueError, match=rf"checkpoint_path = .*{path}'"):
            run(pretrain("other", checkpoint_path=str(tmp_path / path)))
    for damaged in ("", "[]"):
        (tmp_path / "newer" / "checkpoint" / "step-6" / MARKER).write_text(damaged)
        with pytest.raises(ValueError, match=r"step-6 cannot be read .*: leave checkpoint_path out to start over"):
            run(pretrain("other", checkpoint_path=str(tmp_path / "newer" / "checkpoint")))


@pytest.mark.parametrize("exists", [False, True])
def test_a_new_folder_is_where_checkpoints_are_written_and_resumed_from(pretrain, tmp_path, exists):
    unbroken, folder = pretrain("unbroken"), tmp_path / "checkpoints"
    if exists:
        folder.mkdir()
    config = pretrain("broken", checkpoint_path=str(folder))
    stopped(config, 5)
    assert steps(folder) == [3]
    record = run(config)
    assert record["timing"]["resumed_behind_steps"] == [3]
    assert steps(folder) == [STEPS]
    assert not (tmp_path / "broken" / "checkpoint").exists()
    assert_same(config, record, unbroken, run(unbroken))


def test_two_runs_that_begin_with_one_new_folder_do_not_share_it(pretrain, tmp_path):
    folder = tmp_path / "checkpoints"
    first, second = (pretrain(name, checkpoint_path=str(folder)) for name in ("first", "second"))
    network = first.network.build()
    with open_run(first, Layout(), network), pytest.raises(ValueError, match="checkpoints' is in use"):
        run(second)
    stopped(first, 5)
    assert Checkpoints(first, Layout(), network).folder == folder
    assert Checkpoints(second, Layout(), network).folder == tmp_path / "second" / "checkpoint"


def test_another_runs_folder_is_read_and_not_written(pretrain, tmp_path):
    stopped(pretrain("first"), 5)
    folder = tmp_path / "first" / "checkpoint"
    config = pretrain("second", checkpoint_path=str(folder))
    stopped(config, 8)
    assert (steps(folder), steps(tmp_path / "second" / "checkpoint")) == ([3], [6])
    assert run(config)["timing"]["resumed_behind_steps"] == [3, 6], "it has gone on since"
    assert steps(folder) == [3]


def test_as_many_checkpoints_are_kept_as_asked_and_an_earlier_one_can_be_named(pretrain, tmp_path):
    values = {"checkpoint_steps": 1, "keep_checkpoints": 3}
    stopped(pretrain("run", **values), 6)
    folder = tmp_path / "run" / "checkpoint"
    assert steps(folder) == [3, 4, 5]
    config = pretrain("run", checkpoint_path=str(folder / "step-4"), **values)
    stopped(config, 6)
    assert steps(folder) == [3, 4, 5]
    assert run(config)["timing"]["resumed_behind_steps"] == [4]
    assert steps(folder) == [6, 7, 8]


def dense_weights(config, seed):
    tokenizer = tokenizer_for(config)
    return build_language_model(
        config.model_name, tokenizer, positions=config.data.block_size, dropout=0.0, seed=seed
    ).state_dict()


@pytest.mark.parametrize(("values", "entry"), [({}, None), ({"tensor_parallel_size": 2}, "model_state_dict")], ids=str)
def test_a_file_of_another_program_gives_the_weights(pretrain, tmp_path, values, entry):
    config = pretrain("new", checkpoint_path=str(tmp_path / "old"), **values)
    wrapped = "module." if entry is None else "_orig_mod.module."
    weights = {f"{wrapped}{name}": tensor for name, tensor in dense_weights(config, 5).items()}
    (tmp_path / "old").mkdir()
    torch.save({}, tmp_path / "old" / "step_100.pth")
    os.utime(tmp_path / "old" / "step_100.pth", (0, 0))
    torch.save(weights if entry is None else {"step": 300, entry: weights}, tmp_path / "old" / "step_300.pth")
    stopped(config, 5)
    record, other = run(config), run(pretrain("other", seed=5, **values))
    assert record["first_weights"]["file"] == "step_300.pth", "it is known after resuming, too"
    assert losses(record)[0] != losses(other)[0], "other batches"
    assert steps(tmp_path / "new" / "checkpoint") == [STEPS]
    again = run(pretrain("again", checkpoint_path=str(tmp_path / "old" / "step_300.pth"), **values))
    assert losses(again) == losses(record)
    fresh = pretrain("fresh", **values)
    assert losses(record) != losses(run(fresh))
    with pytest.raises(ValueError, match=r"fresh/record.json is of a run that did not begin from .*step_300.pth"):
        run(fresh.replace(checkpoint_path=str(tmp_path / "old")))


def test_a_run_goes_on_only_with_the_weights_it_began_from(pretrain, tmp_path):
    config = pretrain("new", checkpoint_path=str(tmp_path / "w.pth"))
    torch.save(dense_weights(config, 5), tmp_path / "w.pth")
    stopped(config, 5)
    torch.save(dense_weights(config, 6), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"checkpoint/step-3 is of a run that did not begin from .*w.pth"):
        run(config)
    stopped(config.replace(checkpoint_path=None), 8)
    (tmp_path / "w.pth").unlink()  # its weights are no longer needed
    assert run(config)["first_weights"]["file"] == "w.pth"


def test_weights_that_do_not_fit_are_one_line(pretrain, tmp_path):
    config = pretrain("new", checkpoint_path=str(tmp_path / "w.pth"))
    weights = dense_weights(config, 5)
    name = "transformer.wpe.weight"
    for content in (
        {key: weights[key] for key in weights if key != name},
        {**weights, name: torch.zeros(3, 16)},
        {**weights, name: weights[name].clone().fill_(torch.nan)},
        {"step": 3},
        print,
    ):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(ValueError, match=rf"^{tmp_path}/w.pth [^\n]*give [^\n]*$"):
            run(config)
