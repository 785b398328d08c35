"""Test what pretraining finds in its folder: a finished model, a checkpoint, the user's files."""

import copy
import errno
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from lossytp.training.exclusive_run import exclusive_run
from lossytp.training.own_files import MARK
from lossytp.training.pretraining import run as pretraining
from lossytp.training.pretraining.folder import CHECKPOINT, STATISTICS
from lossytp.training.pretraining.run import run
from tests.training.pretraining.tiny_runs import losses, stopped


def test_a_finished_run_is_not_repeated_and_another_configuration_is_refused(pretrain, monkeypatch):
    config = pretrain()
    statistics = run(config)
    monkeypatch.setattr(pretraining, "_Pretraining", None)  # fails if it runs
    assert run(config) == statistics
    assert run(pretrain(num_proc=1, eval_steps=5)) == statistics
    with pytest.raises(ValueError, match="holds a model with different learning_rate: give another folder"):
        run(pretrain(learning_rate=1e-3))


def change_text(config):
    """Change one document of the training text."""
    file = Path(config.data_glob.replace("*", "1"))
    texts = pa.parquet.read_table(file)["text"].to_pylist()
    pa.parquet.write_table(pa.table({"text": [*texts[:-1], "nine"]}), file)


def test_a_finished_model_of_text_that_has_changed_is_refused(pretrain):
    config = pretrain()
    statistics = run(config)
    change_text(config)
    with pytest.raises(ValueError, match=r"the text files have changed since .*pretrain\.json was written: put"):
        run(config)
    Path(config.data_glob.replace("*", "1")).unlink()
    Path(config.data_glob.replace("*", "0")).unlink()
    assert run(config) == statistics, "a finished model is read without its text"


def test_a_checkpoint_of_text_that_has_changed_is_refused(pretrain):
    config = pretrain()
    stopped(config, 5)
    change_text(config)
    with pytest.raises(ValueError, match=r"the text files have changed since .*checkpoint\.pt was written: put"):
        run(config)


def test_a_second_run_in_the_folder_is_refused_and_writes_nothing(pretrain):
    config = pretrain()
    with exclusive_run(config.output_dir), pytest.raises(ValueError, match="is in use by another run"):
        run(config)
    assert list(Path(config.output_dir).iterdir()) == []


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors", "tokenizer.json", "checkpoint.pt"])
def test_a_users_files_are_refused_before_the_first_step_and_stay(pretrain, monkeypatch, name):
    config = pretrain()
    file = Path(config.output_dir) / name
    file.parent.mkdir()
    file.write_text("x")
    (file.parent / "thesis").touch()
    monkeypatch.setattr(pretraining, "_Pretraining", None)  # fails if it runs
    with pytest.raises(ValueError, match=rf"^{file} is (in the way.*: move it|not a checkpoint .*: delete it)"):
        run(config)
    assert file.read_text() == "x"
    assert sorted(path.name for path in file.parent.iterdir()) == sorted([name, "thesis"])


def test_a_checkpoint_of_a_version_without_marks_is_resumed(pretrain):
    config = pretrain()
    stopped(config, 5)
    (Path(config.output_dir) / MARK).unlink()
    assert losses(run(config)) == losses(run(pretrain("unbroken")))


def test_a_flipped_bit_in_a_checkpoint_is_noticed(pretrain):
    config = pretrain()
    stopped(config, 5)
    file = Path(config.output_dir) / CHECKPOINT
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    file.write_bytes(damaged)
    torch.load(file, weights_only=True)
    with pytest.raises(
        ValueError, match=r"checkpoint\.pt is not a checkpoint of this command \(it is damaged: .*: delete it"
    ):
        run(config)


def test_a_checkpoint_of_another_network_is_one_line(pretrain):
    config = pretrain()
    stopped(config, 5)
    file = Path(config.output_dir) / CHECKPOINT
    state = torch.load(file, weights_only=True)
    name = "transformer.wpe.weight"
    optimizer = copy.deepcopy(state["optimizer"])
    optimizer["state"][0]["exp_avg"] = torch.zeros(3)
    for change in (
        {"model": {**state["model"], name: torch.zeros(1)}},
        {"model": {key: value for key, value in state["model"].items() if key != name}},
        {"optimizer": {}},
        {"optimizer": {**state["optimizer"], "state": {}}},
        {"optimizer": optimizer},
        {"blocks": {"start": 3}},
    ):
        torch.save({**state, **change}, file)
        with pytest.raises(
            ValueError, match=r"^the checkpoint in .* does not belong to this run \(.*\): delete it to"
        ) as error:
            run(config)
        assert "\n" not in str(error.value)


def test_on_a_full_disk_the_previous_checkpoint_stays(pretrain, monkeypatch):
    config = pretrain()
    save, saved = torch.save, []

    def second_is_too_large(state, file):
        saved.append(1)
        if len(saved) == 2:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, file)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", second_is_too_large)
        with pytest.raises(
            ValueError, match=r"checkpoint\.pt cannot be written \(No space left on device\): make room"
        ):
            run(config)
    assert len(torch.load(Path(config.output_dir) / CHECKPOINT)["losses"]) == 3
    assert not (Path(config.output_dir) / f".{CHECKPOINT}.part").exists()
    assert losses(run(config)) == losses(run(pretrain("unbroken")))


def test_a_parameter_that_a_finished_model_lacks_has_its_default(pretrain):
    config = pretrain()
    statistics = run(config)
    del statistics["config"]["gradient_clipping"]
    (Path(config.output_dir) / STATISTICS).write_text(json.dumps(statistics))
    assert run(config) == statistics
    with pytest.raises(ValueError, match="holds a model with different gradient_clipping: give another folder"):
        run(pretrain(gradient_clipping=0.5))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"config": 3}', '{"config": {"colour": 1}}'])
def test_a_foreign_file_in_place_of_the_statistics_is_one_line(pretrain, text):
    config = pretrain()
    file = Path(config.output_dir) / STATISTICS
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"^{file} was not written by this command \(.*\): delete it") as error:
        run(config)
    assert "\n" not in str(error.value)


def test_statistics_that_lack_what_the_command_prints_are_one_line(pretrain):
    config = pretrain()
    file = Path(config.output_dir) / STATISTICS
    file.parent.mkdir()
    for numbers in ({}, {"validation_loss": 1.0, "perplexity": 2.0, "tokens": "3"}):
        file.write_text(json.dumps({"config": config.as_dict(), **numbers}))
        with pytest.raises(ValueError, match=rf"^{file} was not written by this command \(.*\): delete it"):
            run(config)


def test_a_folder_that_cannot_be_written_is_one_line(pretrain):
    with pytest.raises(ValueError, match=r"^output_dir = '/dev/null/x' cannot be written \(Not a directory\)"):
        run(pretrain(output_dir="/dev/null/x"))


def test_a_checkpoint_that_cannot_be_used_is_one_line(pretrain, tmp_path):
    (tmp_path / "empty").mkdir()
    stopped(pretrain("run"), 5)
    checkpoint = tmp_path / "run" / CHECKPOINT
    torch.save({"parameters": 1}, tmp_path / "other.pt")
    torch.save({"config": pretrain("run").as_dict(), "model": {}}, tmp_path / "part.pt")
    (tmp_path / "corrupt.pt").write_bytes(checkpoint.read_bytes()[:1000])
    for values, message in (
        ({"checkpoint_path": str(tmp_path / "none.pt")}, r"none\.pt' does not exist: leave it out"),
        ({"checkpoint_path": str(tmp_path / "empty")}, r"empty' has no \*\.pt file: leave it out"),
        ({"checkpoint_path": str(tmp_path / "corrupt.pt")}, r"corrupt\.pt is not a checkpoint of this command \("),
        ({"checkpoint_path": str(tmp_path / "other.pt")}, r"other\.pt is not a checkpoint of this command \("),
        (
            {"checkpoint_path": str(tmp_path / "part.pt")},
            r"part\.pt is not a checkpoint .*it lacks optimizer, blocks, ",
        ),
        ({"seed": 3, "batch_size": 4}, "belongs to a run with different batch_size, seed: give another folder"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            run(pretrain(**values))
        assert "\n" not in str(error.value)
