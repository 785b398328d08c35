"""Test which checkpoint a run resumes from, and where it writes its own."""

import os
from pathlib import Path

import pytest
import torch

from lossytp.parallel.group import Layout
from lossytp.training.checkpoint import MARKER, Checkpoints, number_of, steps_in
from lossytp.training.folder import open_run
from lossytp.training.loop import run
from lossytp.training.models import build_language_model
from lossytp.training.text import tokenizer_for
from tests.training.pretraining.tiny_runs import STEPS, assert_same, losses, stopped

pytestmark = pytest.mark.slow


def steps(folder: Path) -> list[int]:
    return [number_of(path) for path in reversed(steps_in(folder))]


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


def test_nobody_should_delete_another_runs_checkpoint(pretrain, tmp_path):
    stopped(pretrain("first"), 5)
    folder = tmp_path / "first" / "checkpoint" / "step-3"
    config = pretrain("second", checkpoint_path=str(folder), learning_rate=0.5)
    with pytest.raises(ValueError, match=r"learning_rate = .*leave checkpoint_path out to start over$"):
        run(config)
    (folder / MARKER).write_text("{}")
    with pytest.raises(ValueError, match=r"step-3 cannot be read .*: leave checkpoint_path out to start over$"):
        run(config)


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
    """Return the weights of a model of this configuration, with another seed."""
    tokenizer = tokenizer_for(config)
    return build_language_model(
        config.model_name, tokenizer, positions=config.data.block_size, dropout=0.0, seed=seed
    ).state_dict()


@pytest.mark.parametrize(("values", "entry"), [({}, None), ({"tensor_parallel_size": 2}, "model_state_dict")], ids=str)
def test_a_file_of_another_program_gives_the_weights(pretrain, tmp_path, values, entry):
    config = pretrain("new", checkpoint_path=str(tmp_path / "old"), **values)
    weights = {f"module.{name}": tensor for name, tensor in dense_weights(config, 5).items()}
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


def test_a_checkpoint_comes_before_weights_in_the_same_folder(pretrain, tmp_path):
    stopped(pretrain("first"), 5)
    torch.save(dense_weights(pretrain("first"), 5), tmp_path / "first" / "w.pth")
    config = pretrain("second", checkpoint_path=str(tmp_path / "first"))
    record = run(config)
    assert "first_weights" not in record
    assert run(config) == record, "it is finished"


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
