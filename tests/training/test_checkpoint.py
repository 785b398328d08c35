"""Test checkpoints, and that a run killed with SIGKILL and resumed equals an unbroken one to the last digit."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lossytp.training.checkpoint import MARKER
from lossytp.training.config import TrainConfig
from lossytp.training.loop import run
from lossytp.training.record import read_record
from tests.training.killed_runs import result, started

pytestmark = pytest.mark.slow


class Stopped(Exception):
    pass


@pytest.fixture
def stopped(toy, monkeypatch):
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
    return tmp_path / "run" / "checkpoint" / "step-2"


def change(step, **values: Any) -> None:
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


KILLED = -9
EQUAL_LENGTHS = {"max_length": 4, "batch_size": 8}  # messages of equal size, so that stale values are used
DRIFTING = {"reliable_gather": False, "replicated_gradients": "none", "resync_every": 4}
ONE_PROCESS: dict[str, dict[str, Any]] = {
    "virtual ranks with dropout": {"tensor_parallel_size": 4, "dropout": 0.1, "patience": 5},
    "stale": {"tensor_parallel_size": 2, "repair": "stale", **EQUAL_LENGTHS},
    "own streams that drift": {"tensor_parallel_size": 2, **DRIFTING},
    "noise": {"tensor_parallel_size": 2, "control": "noise", "loss_type": "ber", "mean_burst_packets": None},
    "scaled, in microbatches": {"tensor_parallel_size": 2, "fp16": True, "gradient_accumulation_steps": 3},
    "correlated links": {"tensor_parallel_size": 2, "loss_type": "correlated(shared=0.5)"},
}
PROCESSES: dict[str, dict[str, Any]] = {
    "lossytp": {"tensor_parallel_size": 4, "dropout": 0.1},
    "stale": {"tensor_parallel_size": 2, "repair": "stale", **EQUAL_LENGTHS},
    "dtensor": {"tensor_parallel_size": 2, "implementation": "dtensor", "loss_type": "ber", "mean_burst_packets": None},
    "megatron": {"tensor_parallel_size": 2, "implementation": "megatron"},
    "ddp": {"data_parallel_size": 2, "dropout": 0.1},
    "fsdp": {"data_parallel_size": 2, "data_parallel_type": "fsdp"},
    "1f1b": {"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b", "dropout": 0.1},
    "virtual ranks and ddp": {"tensor_parallel_size": 2, "data_parallel_size": 2, "gradient_accumulation_steps": 2},
}


def unbroken(folder: Path, processes: int, **values: Any) -> dict[str, Any]:
    assert started(folder, processes, output_dir=str(folder / "unbroken"), **values) == [0] * processes
    record = result(folder, "unbroken")
    assert record["network"]["training"]["lost"] > 0 or values.get("control")
    return record


@pytest.mark.parametrize("values", ONE_PROCESS.values(), ids=ONE_PROCESS)
def test_one_process_killed_twice_equals_an_unbroken_run(tmp_path, values):
    assert started(tmp_path, 1, ("step", 4, 0), **values) == [KILLED]
    assert read_record(tmp_path / "run") is None
    assert started(tmp_path, 1, ("step", 3, 0), **values) == [KILLED]
    assert started(tmp_path, 1, **values) == [0]
    assert read_record(tmp_path / "run")["timing"]["resumed_behind_steps"] == [2, 4]
    assert result(tmp_path) == unbroken(tmp_path, 1, **values)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["record.json"]


@pytest.mark.parametrize("name", PROCESSES)
def test_two_processes_of_which_one_is_killed_equal_an_unbroken_run(tmp_path, name):
    values, number = PROCESSES[name], list(PROCESSES).index(name)
    assert KILLED in started(tmp_path, 2, ("step", 3 + number % 2, number // 2 % 2), **values)
    assert started(tmp_path, 2, **values) == [0, 0]
    assert read_record(tmp_path / "run")["timing"]["resumed_behind_steps"] == [2]
    assert result(tmp_path) == unbroken(tmp_path, 2, **values)


def test_a_run_in_another_librarys_layers_goes_on_in_this_projects(tmp_path):
    lossless = {"tensor_parallel_size": 2, "loss_type": "ber", "mean_burst_packets": None, "loss_rate": 0.0}
    assert KILLED in started(tmp_path, 2, ("step", 3, 0), implementation="megatron", **lossless)
    assert started(tmp_path, 1, **lossless) == [0]
    record = read_record(tmp_path / "run")
    assert record["timing"]["resumed_behind_steps"] == [2]
    assert started(tmp_path, 1, output_dir=str(tmp_path / "unbroken"), **lossless) == [0]
    assert record["final"] == pytest.approx(read_record(tmp_path / "unbroken")["final"], rel=1e-3)


@pytest.mark.parametrize(
    ("kill", "behind"),
    [(("file", 3, 1), 2), (("file", 3, 0), 2), (("marker", 3, 0), 2), (("folder", 3, 0), 2), (("moved", 3, 0), 4)],
)
def test_a_run_killed_while_it_writes_a_checkpoint_resumes_from_the_previous_one(tmp_path, kill, behind):
    assert KILLED in started(tmp_path, 2, kill, tensor_parallel_size=2)
    kept = tmp_path / "run" / "checkpoint"
    assert max(path.name for path in kept.glob("step-*")) == f"step-{behind}"
    assert started(tmp_path, 2, tensor_parallel_size=2) == [0, 0]
    assert read_record(tmp_path / "run")["timing"]["resumed_behind_steps"] == [behind]
    assert result(tmp_path) == unbroken(tmp_path, 2, tensor_parallel_size=2)
    assert not kept.exists()


def test_the_same_command_resumes_wherever_it_was_killed(tmp_path):
    words = ["--max_steps", "80", "--batch_size", "2", "--max_samples", "50", "--eval_samples", "20", "--max_length"]
    words += ["8", "--loss_rate", "0.1", "--dropout", "0.1", "--checkpoint_steps", "3", "--eval_steps", "7"]
    command = [sys.executable, "-m", "lossytp.train", *words, "--output_dir"]
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"} | {
        "OMP_NUM_THREADS": "1"
    }
    killed = subprocess.Popen([*command, str(tmp_path / "run")], env=environment, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("run/checkpoint/step-*")):
        time.sleep(0.01)
    time.sleep(0.2)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == KILLED
    assert read_record(tmp_path / "run") is None
    for name in ("run", "whole"):
        subprocess.run([*command, str(tmp_path / name)], env=environment, check=True, capture_output=True)
    assert len(read_record(tmp_path / "run")["timing"]["resumed_behind_steps"]) == 1
    assert result(tmp_path) == result(tmp_path, "whole")
