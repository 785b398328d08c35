"""Test checkpoints: which are refused, what they hold, and what lies beside them."""

import errno
import json
from typing import Any

import pytest
import torch

from lossytp.training.checkpoint import STATE, restore_, training_state
from lossytp.training.config import TrainConfig
from lossytp.training.loop import run
from lossytp.training.models import load_tokenizer
from lossytp.training.own_files import MARK
from lossytp.training.tasks.data import load_dataset, training_batches


class Stopped(Exception):
    pass


@pytest.fixture
def stopped(toy, monkeypatch):
    """Return a function that runs here until the checkpoint of step 2, and leaves it."""

    def leave(**values: Any) -> TrainConfig:
        config = toy(**{"checkpoint_steps": 2, "loss_rate": 0.1, **values})
        with monkeypatch.context() as patched:
            patched.setattr("lossytp.training.loop._Run._evaluate", lambda *_: (_ for _ in ()).throw(Stopped))
            with pytest.raises(Stopped):
                run(toy(**{**config.changes(), "eval_steps": 3}))
        return config

    return leave


def test_a_checkpoint_of_another_configuration_is_refused(stopped, toy):
    stopped(eval_steps=3)
    with pytest.raises(ValueError, match=r"unfinished run with different loss_rate, learning_rate: give another"):
        run(toy(eval_steps=3, loss_rate=0.2, learning_rate=1.0))


def test_settings_that_do_not_change_the_result_may_differ(stopped, toy):
    stopped(eval_steps=3)
    record = run(toy(eval_steps=3, loss_rate=0.1, checkpoint_steps=5, tensorboard=True))
    assert record["timing"]["resumed_behind_steps"] == [2]


def test_a_checkpoint_of_another_number_of_processes_is_refused(stopped, tmp_path):
    config = stopped(eval_steps=3)
    marker = tmp_path / "run" / "checkpoint" / "step.json"
    marker.write_text(marker.read_text().replace('"processes": 1', '"processes": 2'))
    with pytest.raises(ValueError, match="belongs to a run on 2 processes, not 1: start 2"):
        run(config)


@pytest.mark.parametrize("name", ["step.json", "step-2.rank-0.pt"])
def test_a_damaged_checkpoint_is_named_with_what_to_delete(stopped, tmp_path, name):
    config = stopped(eval_steps=3)
    (tmp_path / "run" / "checkpoint" / name).write_bytes(b"half")
    with pytest.raises(ValueError, match=rf"{name} .*delete .*checkpoint to start over"):
        run(config)


def test_an_unknown_marker_is_named_with_what_to_delete(stopped, tmp_path):
    config = stopped(eval_steps=3)
    marker = tmp_path / "run" / "checkpoint" / "step.json"
    written = json.loads(marker.read_text())
    for content in ({**written, "config": []}, {**written, "step": None}, []):
        marker.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"step\.json is damaged: delete .*checkpoint to start over"):
            run(config)
    marker.unlink()
    marker.mkdir()
    with pytest.raises(ValueError, match=r"step\.json is damaged: delete .*checkpoint to start over"):
        run(config)


def test_a_state_that_lacks_something_is_named_with_what_to_delete(stopped, tmp_path):
    config = stopped(eval_steps=3)
    file = tmp_path / "run" / "checkpoint" / "step-2.rank-0.pt"
    whole = torch.load(file, weights_only=True)
    damaged = [
        {name: value for name, value in whole.items() if name != "optimizer"},
        {**whole, "plain": json.dumps({"losses": []})},
        {**whole, "plain": "null"},
        {name: value for name, value in whole.items() if name != "plain"},
        [1],
    ]
    for state, reason in zip(damaged, ("it lacks optimizer", "it lacks evaluations", "", "plain", ""), strict=True):
        torch.save(state, file)
        with pytest.raises(ValueError, match=rf"rank-0\.pt cannot be read \(.*{reason}.*\): delete .* to start over"):
            run(config)


def test_a_flipped_bit_is_noticed(stopped, tmp_path):
    """In any tensor: `torch.load` reads damaged tensors without an error."""
    config = stopped(eval_steps=3)
    file = tmp_path / "run" / "checkpoint" / "step-2.rank-0.pt"
    whole = file.read_bytes()
    for share in (0.2, 0.5, 0.8):
        damaged = bytearray(whole)
        damaged[int(share * len(whole))] ^= 4
        file.write_bytes(damaged)
        torch.load(file, weights_only=True)
        with pytest.raises(
            ValueError, match=r"rank-0\.pt cannot be read \(it is damaged: .*: delete .* to start over$"
        ):
            run(config)
    file.write_bytes(whole)
    assert run(config)["timing"]["resumed_behind_steps"] == [2]


def test_a_state_of_another_network_is_one_line(stopped, tmp_path):
    config = stopped(eval_steps=3)
    file = tmp_path / "run" / "checkpoint" / "step-2.rank-0.pt"
    state = torch.load(file, weights_only=True)
    name = "transformer.wpe.weight"
    optimizer = [{**state["optimizer"][0], "exp_avg": torch.zeros(3)}, *state["optimizer"][1:]]
    parameters = state["parameters"]
    for change, reason in (
        ({"parameters": {**parameters, name: torch.zeros(1)}}, rf"{name} has shape \(1,\), not \(128, 128\)"),
        ({"parameters": {key: parameters[key] for key in parameters if key != name}}, f"{name} is missing"),
        ({"parameters": {**parameters, "extra": torch.zeros(1)}}, "extra is unknown"),
        ({"parameters": {**parameters, name: "text"}}, "shape"),
        ({"optimizer": state["optimizer"][:-1]}, "argument"),
        ({"optimizer": [{"step": torch.tensor(2.0)}, *state["optimizer"][1:]]}, "parameter 0 has step, not exp_avg"),
        ({"optimizer": optimizer}, r"exp_avg of parameter 0 has shape \(3,\)"),
        ({"network": "[1, 2]"}, ""),
        ({"network": json.dumps({"garbage": 1})}, ""),
        ({"random": torch.zeros(2)}, ""),
        ({"memories": [1]}, ""),
    ):
        torch.save({**state, **change}, file)
        with pytest.raises(
            ValueError, match=rf"checkpoint does not belong to this run \(.*{reason}.*\): delete it to"
        ) as error:
            run(config)
        assert "\n" not in str(error.value)


def test_a_trace_that_changed_is_refused(stopped, toy, tmp_path):
    trace = tmp_path / "trace.txt"
    trace.write_text("0001000000")
    values = {"eval_steps": 3, "loss_type": f"trace('{trace}')", "loss_rate": 0.0}
    config = stopped(**values)
    trace.write_text("0010000000")
    for what in ("checkpoint", "record.json"):
        with pytest.raises(ValueError, match=rf"the file of trace\(.* has changed since .*{what} was written"):
            run(config)
        trace.write_text("0 0 0 1 0 0 0 0 0 0")  # the same losses
        run(config)
        trace.write_text("0010000000")
    record = tmp_path / "run" / "record.json"
    older = json.loads(record.read_text())
    del older["trace_sha256"]
    record.write_text(json.dumps(older))
    assert run(config)["final"] == older["final"]


def test_a_checkpoint_of_a_version_without_marks_is_resumed(stopped, tmp_path):
    config = stopped(eval_steps=3)
    folder = tmp_path / "run" / "checkpoint"
    (folder / MARK).unlink()
    assert run(config)["timing"]["resumed_behind_steps"] == [2]
    assert not folder.exists()


def test_an_unmarked_folder_with_a_file_beside_checkpoints_is_refused(stopped, tmp_path):
    config = stopped(eval_steps=3)
    folder = tmp_path / "run" / "checkpoint"
    (folder / MARK).unlink()
    (folder / "thesis").touch()
    with pytest.raises(ValueError, match=r"checkpoint/step-2.rank-0.pt \(and 2 more\) is in the way"):
        run(config)
    assert len(list(folder.iterdir())) == 3


def test_a_file_that_is_put_beside_checkpoints_stays(stopped, tmp_path):
    config = stopped(eval_steps=3)
    folder = tmp_path / "run" / "checkpoint"
    (folder / "thesis").touch()
    assert run(config)["timing"]["resumed_behind_steps"] == [2]
    assert [path.name for path in folder.iterdir()] == ["thesis"]


def test_on_a_full_disk_the_previous_checkpoint_stays(toy, tmp_path, monkeypatch):
    config = toy(checkpoint_steps=2, loss_rate=0.1)
    save, saved = torch.save, []

    def second_is_too_large(state, file):
        saved.append(1)
        if len(saved) == 2:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", second_is_too_large)
    with pytest.raises(
        ValueError, match=r"^.*step-4.rank-0.pt cannot be written \(No space left on device\): make room"
    ):
        run(config)
    names = {path.name for path in (tmp_path / "run" / "checkpoint").iterdir()}
    assert names == {MARK, "step.json", "step-2.rank-0.pt"}
    assert run(config)["timing"]["resumed_behind_steps"] == [2]


def test_state_lists_the_keys_of_a_training_state():
    layer, network = torch.nn.Linear(2, 2), TrainConfig().network()
    state = training_state(layer, torch.optim.AdamW(layer.parameters()), torch.amp.GradScaler("cpu"), network)
    assert tuple(state) == STATE


def test_a_checkpoint_of_other_data_is_refused(stopped, monkeypatch):
    config = stopped(eval_steps=3)
    original = load_dataset
    monkeypatch.setattr(
        "lossytp.training.finetuning.load_dataset",
        lambda *names, **sizes: original(*names, **sizes).__class__(
            **{**vars(original(*names, **sizes)), "sha256": "another"}
        ),
    )
    with pytest.raises(ValueError, match=r"^the data of toy has changed since .*checkpoint was written.* or delete"):
        run(config)


def test_seconds_add_up_over_resumed_runs(stopped, tmp_path):
    config = stopped(eval_steps=3)
    file = tmp_path / "run" / "checkpoint" / "step-2.rank-0.pt"
    state = torch.load(file, weights_only=True)
    plain = json.loads(state["plain"])
    torch.save({**state, "plain": json.dumps({**plain, "earlier_seconds": 1000.0, "step_seconds": [100.0] * 2})}, file)
    record = run(config)
    assert 200 < record["timing"]["train_seconds"] < 300
    assert record["curves"]["eval"][0]["seconds"] > 200
    assert 1000 < record["timing"]["total_seconds"] < 1100


def test_the_scale_of_the_training_loss_is_kept():
    layer, network = torch.nn.Linear(2, 2), TrainConfig().network()
    states = []
    for scale in (8.0, 2.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = torch.optim.AdamW(layer.parameters())
        scaler.scale(layer(torch.ones(2)).sum()).backward()
        if states:
            restore_(states[0], layer, optimizer, scaler, network)
        assert scaler.get_scale() == 8.0
        states.append(training_state(layer, optimizer, scaler, network))


def test_batches_are_skipped_without_being_made(toy, monkeypatch):
    toy()
    sizes = {"max_length": 8, "train_samples": None, "test_samples": None}
    split = load_dataset("toy", load_tokenizer("gpt2-nano-scratch"), **sizes).train
    settings = {"batch_size": 24, "seed": 3}
    whole = training_batches(split, **settings)
    expected = [next(whole)["input_ids"] for _ in range(12)]
    made = []
    original = type(split).batch
    monkeypatch.setattr(type(split), "batch", lambda *arguments: made.append(1) or original(*arguments))
    for skip in (0, 1, 3, 10):
        made.clear()
        assert torch.equal(next(training_batches(split, **settings, skip=skip))["input_ids"], expected[skip])
        assert len(made) == 1
