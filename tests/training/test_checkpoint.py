"""Test checkpoints: which are resumed, which are refused, and what lies beside them."""

import errno
import json
import os
import shutil
from typing import Any

import pytest
import torch

from lossytp.training.batches import load_dataset, training_batches
from lossytp.training.checkpoint import MARKER
from lossytp.training.config import TrainConfig
from lossytp.training.loop import run
from lossytp.training.models import load_tokenizer

pytestmark = pytest.mark.slow


class Stopped(Exception):
    pass


@pytest.fixture
def stopped(toy, monkeypatch):
    """Return a function that runs here until the checkpoint of step 2, and leaves it."""

    def leave(**values: Any) -> TrainConfig:
        config = toy(**{"checkpoint_steps": 2, "loss_rate": 0.1, "eval_steps": 3, **values})
        with monkeypatch.context() as patched:
            patched.setattr("lossytp.training.loop.Run._evaluate", lambda *_: (_ for _ in ()).throw(Stopped))
            with pytest.raises(Stopped):
                run(config)
        return config

    return leave


@pytest.fixture
def step(tmp_path):
    """Return the folder of the checkpoint of step 2."""
    return tmp_path / "run" / "checkpoint" / "step-2"


def change(step, **values: Any) -> None:
    """Change values that a checkpoint of one process has."""
    state = torch.load(step / "process-0.pt", weights_only=False)
    torch.save({**state, **values}, step / "process-0.pt")


def test_another_configuration_is_refused(stopped, toy):
    stopped()
    with pytest.raises(ValueError, match=r"loss_rate = .*learning_rate = "):
        run(toy(eval_steps=3, loss_rate=0.2, learning_rate=1.0))


def test_settings_that_do_not_change_the_result_may_differ(stopped, toy):
    stopped()
    record = run(toy(eval_steps=3, loss_rate=0.1, checkpoint_steps=5, tensorboard=True))
    assert record["timing"]["resumed_behind_steps"] == [2]


def test_a_damaged_file_is_named_with_what_to_delete(stopped, step):
    """Cut short, missing, or with a flipped bit in any tensor: `torch.load` reads damaged tensors without an error."""
    config = stopped()
    for name in (MARKER, "process-0.pt"):
        content = (step / name).read_bytes()
        damages = [content[: len(content) // 2]] + [None] * (name != MARKER)
        for share in (0.2, 0.5, 0.8) if name != MARKER else ():
            flipped = bytearray(content)
            flipped[int(share * len(content))] ^= 4
            damages.append(bytes(flipped))
        for damage in damages:
            (step / name).unlink()
            if damage is not None:
                (step / name).write_bytes(damage)
            with pytest.raises(ValueError, match=rf"^{step} cannot be read \(.*\): delete {step} to start over$"):
                run(config)
            (step / name).write_bytes(content)
    assert run(config)["timing"]["resumed_behind_steps"] == [2]


def test_another_version_is_refused(stopped, step):
    config = stopped()
    written = json.loads((step / MARKER).read_text())
    for other in ({**written, "version": 2}, {name: written[name] for name in written if name != "version"}, [], {}):
        (step / MARKER).write_text(json.dumps(other))
        with pytest.raises(ValueError, match=r"step-2 cannot be read"):
            run(config)


class Harmful:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.folder,)


def test_a_state_that_would_run_code_does_not(stopped, step, tmp_path):
    config = stopped()
    torch.save(Harmful(str(tmp_path / "harmed")), step / "process-0.pt")
    with pytest.raises(Exception, match="Weights only"):
        run(config)
    assert not (tmp_path / "harmed").exists()


def test_a_trace_that_changed_is_refused(stopped, tmp_path):
    trace = tmp_path / "trace.txt"
    trace.write_text("0001000000")
    config = stopped(loss_type=f"trace('{trace}')", loss_rate=0.0)
    for written in ("step-2", "record.json"):
        trace.write_text("0010000000")
        with pytest.raises(ValueError, match=rf"the file of trace\(.* has changed since .*{written}"):
            run(config)
        trace.write_text("0 0 0 1 0 0 0 0 0 0")  # the same losses
        run(config)
    record = tmp_path / "run" / "record.json"
    older = json.loads(record.read_text())
    del older["trace_sha256"]
    record.write_text(json.dumps(older))
    trace.write_text("0010000000")
    assert run(config)["final"] == older["final"]


def test_other_data_is_refused(stopped, monkeypatch):
    config = stopped()

    def changed(*names: Any, **sizes: Any) -> Any:
        data = load_dataset(*names, **sizes)
        return type(data)(**{**vars(data), "sha256": "another"})

    monkeypatch.setattr("lossytp.training.objectives.load_dataset", changed)
    with pytest.raises(ValueError, match=r"the data of toy has changed since .*step-2"):
        run(config)


def test_a_users_files_stay(stopped, step):
    config = stopped()
    files = [step.parent / "thesis", step / "notes", step.parent / "step-4" / "x"]
    files[2].parent.mkdir()
    for file in files:
        file.touch()
    with pytest.raises(ValueError, match=r"step-4 is in the way"):
        run(config)
    shutil.move(step.parent / "step-4", step.parent / "others")
    assert run(config)["timing"]["resumed_behind_steps"] == [2]
    assert {str(path.relative_to(step.parent)) for path in step.parent.rglob("*")} == {
        *("thesis", "step-2", "step-2/notes", "others", "others/x")
    }


def test_on_a_full_disk_the_previous_checkpoint_stays(toy, step, monkeypatch):
    config, save, saved = toy(checkpoint_steps=2, loss_rate=0.1), torch.save, []

    def second_is_too_large(state, file):
        saved.append(1)
        if len(saved) == 2:
            file.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", second_is_too_large)
    with pytest.raises(ValueError, match=r"^.*step-4 cannot be written \(No space left on device\): make room"):
        run(config)
    assert [path.name for path in step.parent.iterdir()] == ["step-2"]
    assert run(config)["timing"]["resumed_behind_steps"] == [2]


def test_seconds_add_up_over_resumed_runs(stopped, step):
    config = stopped()
    history = json.loads(torch.load(step / "process-0.pt", weights_only=False)["history"])
    change(step, history=json.dumps({**history, "earlier_seconds": 1000.0, "step_seconds": [100.0] * 2}))
    record = run(config)
    assert 200 < record["timing"]["train_seconds"] < 300
    assert record["curves"]["eval"][0]["seconds"] > 200
    assert 1000 < record["timing"]["total_seconds"] < 1100


def test_the_scale_of_the_training_loss_is_kept(stopped, step):
    config, scales = stopped(fp16=True), []
    scaler = torch.load(step / "process-0.pt", weights_only=False)["scaler"]
    change(step, scaler={**scaler, "scale": 8.0})
    with pytest.MonkeyPatch.context() as patched:
        original = torch.amp.GradScaler.scale
        patched.setattr(
            torch.amp.GradScaler, "scale", lambda self, loss: scales.append(self.get_scale()) or original(self, loss)
        )
        run(config)
    assert scales[0] == 8.0


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
