"""Test checkpoints: which are refused, what they hold, and what lies beside them."""

import errno
import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lossytp.parallel.group import Layout
from lossytp.parallel.places import places
from lossytp.training.batches import load_dataset, training_batches
from lossytp.training.checkpoint import MARKER, STATE, TrainingState
from lossytp.training.config import TrainConfig
from lossytp.training.files import MARK
from lossytp.training.loop import run
from lossytp.training.models import load_tokenizer
from tests.training.checkpoint_contents import rewrite


class Stopped(Exception):
    pass


@pytest.fixture
def stopped(toy, monkeypatch):
    """Return a function that runs here until the checkpoint of step 2, and leaves it."""

    def leave(**values: Any) -> TrainConfig:
        config = toy(**{"checkpoint_steps": 2, "loss_rate": 0.1, **values})
        with monkeypatch.context() as patched:
            patched.setattr("lossytp.training.loop.Run._evaluate", lambda *_: (_ for _ in ()).throw(Stopped))
            with pytest.raises(Stopped):
                run(toy(**{**config.changes(), "eval_steps": 3}))
        return config

    return leave


def test_a_checkpoint_of_another_configuration_is_refused(stopped, toy):
    stopped(eval_steps=3)
    with pytest.raises(
        ValueError,
        match=r"unfinished run with loss_rate = \S+, not 0\.2; learning_rate = \S+, not 1\.0: give another",
    ):
        run(toy(eval_steps=3, loss_rate=0.2, learning_rate=1.0))


def test_settings_that_do_not_change_the_result_may_differ(stopped, toy):
    stopped(eval_steps=3)
    record = run(toy(eval_steps=3, loss_rate=0.1, checkpoint_steps=5, tensorboard=True))
    assert record["timing"]["resumed_behind_steps"] == [2]


@pytest.mark.parametrize("name", [MARKER, ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("how", ["cut short", "missing"])
def test_a_damaged_checkpoint_is_named_with_what_to_delete(stopped, tmp_path, name, how):
    config = stopped(eval_steps=3)
    folder = tmp_path / "run" / "checkpoint" / "step-2"
    file = folder / name
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"^{folder} is damaged \(.*{name}.*\): delete {folder} to start over$"):
        run(config)
    file.write_bytes(content)
    assert run(config)["timing"]["resumed_behind_steps"] == [2]


def test_an_older_checkpoint_is_used_if_the_newest_is_damaged(stopped, tmp_path, capsys):
    config = stopped(eval_steps=3)
    folder = tmp_path / "run" / "checkpoint"
    shutil.copytree(folder / "step-2", folder / "step-10")
    (folder / "step-10" / "__0_0.distcp").write_bytes(b"half")
    assert run(config)["timing"]["resumed_behind_steps"] == [2]
    assert f"step-10 is damaged (the checksum of __0_0.distcp does not match): resuming from {folder}/step-2 " in (
        capsys.readouterr().err
    )


def test_an_unknown_marker_is_named_with_what_to_delete(stopped, tmp_path):
    config = stopped(eval_steps=3)
    marker = tmp_path / "run" / "checkpoint" / "step-2" / MARKER
    written = json.loads(marker.read_text())
    no_layout = {name: value for name, value in written["config"].items() if name != "tensor_parallel_size"}
    changes = ({"config": []}, {"step": None}, {"files": 3}, {"processes": 0}, {"config": no_layout})
    for content in (*({**written, **change} for change in changes), [], {}):
        marker.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"step-2 is damaged .*: delete .*step-2 to start over"):
            run(config)
    marker.unlink()
    marker.mkdir()
    with pytest.raises(ValueError, match=r"step-2 is damaged .*: delete .*step-2 to start over"):
        run(config)


def test_a_state_that_lacks_something_is_named_with_what_to_delete(stopped, tmp_path):
    config = stopped(eval_steps=3)
    folder, kept = tmp_path / "run" / "checkpoint" / "step-2", tmp_path / "kept"
    shutil.copytree(folder, kept)
    damages = {
        "it lacks steps": lambda state: {name: value for name, value in state.items() if name != "steps"},
        "it lacks evaluations": lambda state: {**state, "plain": json.dumps({"losses": []})},
        "": lambda state: {**state, "plain": "null"},
        "it lacks plain": lambda state: {name: value for name, value in state.items() if name != "plain"},
        "list": lambda state: [1],
    }
    for reason, damage in damages.items():
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        rewrite(folder, lambda tensors, state, damage=damage: (tensors, damage(state)))
        with pytest.raises(ValueError, match=rf"step-2 cannot be read \(.*{reason}.*\): delete .* to start over"):
            run(config)


def test_a_flipped_bit_is_noticed(stopped, tmp_path):
    """In any tensor: `torch.load` reads damaged tensors without an error."""
    config = stopped(eval_steps=3)
    file = tmp_path / "run" / "checkpoint" / "step-2" / "__0_0.distcp"
    content = file.read_bytes()
    for share in (0.2, 0.5, 0.8):
        damaged = bytearray(content)
        damaged[int(share * len(content))] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"step-2 is damaged \(the checksum of .*: delete .* to start over$"):
            run(config)
    file.write_bytes(content)
    assert run(config)["timing"]["resumed_behind_steps"] == [2]


def test_a_state_of_another_network_is_one_line(stopped, tmp_path):
    config = stopped(eval_steps=3)
    folder, kept = tmp_path / "run" / "checkpoint" / "step-2", tmp_path / "kept"
    shutil.copytree(folder, kept)
    name, moment = "parameter transformer.wpe.weight", "exp_avg transformer.wpe.weight"

    def of_tensors(change: Callable[[dict], dict]) -> Callable:
        return lambda tensors, state: (change(tensors), state)

    def of_state(**changes: Any) -> Callable:
        return lambda tensors, state: (tensors, {**state, **changes})

    for change, reason in (
        (of_tensors(lambda all_: {**all_, name: torch.zeros(1, 1)}), rf"{name} has shape \(1, 1\), not \(128, 128\)"),
        (of_tensors(lambda all_: {key: all_[key] for key in all_ if key != name}), f"{name} is missing"),
        (of_tensors(lambda all_: {**all_, moment: torch.zeros(3)}), rf"{moment} has shape \(3,\)"),
        (of_tensors(lambda all_: {key: all_[key] for key in all_ if key != moment}), f"{moment} is missing"),
        (of_state(network="[1, 2]"), ""),
        (of_state(network=json.dumps({"garbage": 1})), ""),
        (of_state(random=torch.zeros(2)), ""),
        (of_state(memories=[1]), ""),
        (of_state(position={"start": 3}, steps=3), ""),
    ):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        rewrite(folder, change)
        with pytest.raises(
            ValueError, match=rf"step-2 does not belong to this run \(.*{reason}.*\): delete .* to"
        ) as error:
            run(config)
        assert "\n" not in str(error.value)


def test_a_trace_that_changed_is_refused(stopped, toy, tmp_path):
    trace = tmp_path / "trace.txt"
    trace.write_text("0001000000")
    values = {"eval_steps": 3, "loss_type": f"trace('{trace}')", "loss_rate": 0.0}
    config = stopped(**values)
    trace.write_text("0010000000")
    for what in ("step-2", "record.json"):
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


def test_a_checkpoint_of_an_older_version_is_refused(stopped, tmp_path):
    config = stopped(eval_steps=3)
    (tmp_path / "run" / "checkpoint" / "step.json").write_text("{}")
    with pytest.raises(ValueError, match=r"checkpoint is of an older version, which this one cannot read: delete it"):
        run(config)


def test_an_unmarked_folder_is_refused(stopped, tmp_path):
    config = stopped(eval_steps=3)
    folder = tmp_path / "run" / "checkpoint"
    (folder / MARK).unlink()
    with pytest.raises(ValueError, match=r"checkpoint/step-2 is in the way"):
        run(config)
    assert [path.name for path in folder.iterdir()] == ["step-2"]


def test_a_file_that_is_put_beside_checkpoints_stays(stopped, tmp_path):
    config = stopped(eval_steps=3)
    folder = tmp_path / "run" / "checkpoint"
    (folder / "thesis").touch()
    assert run(config)["timing"]["resumed_behind_steps"] == [2]
    assert [path.name for path in folder.iterdir()] == ["thesis"]


def test_on_a_full_disk_the_previous_checkpoint_stays(toy, tmp_path, monkeypatch):
    config = toy(checkpoint_steps=2, loss_rate=0.1)
    save, saved = torch.save, []

    def one_is_too_large(state, file):
        saved.append(1)
        if len(saved) == half:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, file)

    half = -1
    monkeypatch.setattr(torch, "save", one_is_too_large)
    run(toy(checkpoint_steps=4, loss_rate=0.1, output_dir=str(tmp_path / "once")))
    half, saved = len(saved) * 3 // 2, []
    with pytest.raises(ValueError, match=r"^.*step-4 cannot be written \(No space left on device\): make room"):
        run(config)
    names = {path.name for path in (tmp_path / "run" / "checkpoint").iterdir()}
    assert names == {MARK, "step-2"}
    assert run(config)["timing"]["resumed_behind_steps"] == [2]


def layer_state() -> TrainingState:
    layer = torch.nn.Linear(2, 2)
    optimizer, scaler = torch.optim.AdamW(layer.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
    return TrainingState(layer, places(layer, Layout()), optimizer, scaler, TrainConfig().network())


def test_state_lists_the_keys_of_a_processs_own_state():
    assert tuple(layer_state().own()) == STATE


def test_a_checkpoint_of_other_data_is_refused(stopped, monkeypatch):
    config = stopped(eval_steps=3)
    original = load_dataset
    monkeypatch.setattr(
        "lossytp.training.objectives.load_dataset",
        lambda *names, **sizes: original(*names, **sizes).__class__(
            **{**vars(original(*names, **sizes)), "sha256": "another"}
        ),
    )
    with pytest.raises(ValueError, match=r"^the data of toy has changed since .*step-2 was written.* or delete"):
        run(config)


def test_seconds_add_up_over_resumed_runs(stopped, tmp_path):
    config = stopped(eval_steps=3)

    def slow(tensors: dict, state: dict) -> tuple[dict, dict]:
        times = {"earlier_seconds": 1000.0, "step_seconds": [100.0] * 2}
        return tensors, {**state, "plain": json.dumps({**json.loads(state["plain"]), **times})}

    rewrite(tmp_path / "run" / "checkpoint" / "step-2", slow)
    record = run(config)
    assert 200 < record["timing"]["train_seconds"] < 300
    assert record["curves"]["eval"][0]["seconds"] > 200
    assert 1000 < record["timing"]["total_seconds"] < 1100


def test_the_scale_of_the_training_loss_is_kept():
    first, second = layer_state(), layer_state()
    second.scaler.load_state_dict({**first.scaler.state_dict(), "scale": 2.0})
    second.scaler.scale(second.module(torch.ones(2)).sum()).backward()
    second.restore_own_(first.own())
    assert second.scaler.get_scale() == 8.0


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
