"""Test that a run killed with SIGKILL and resumed equals an unbroken one to the last digit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lossytp.training.record import read_record
from tests.training.killed_runs import result, started

pytestmark = pytest.mark.slow

KILLED = -9
EQUAL_LENGTHS = {"max_length": 4, "batch_size": 8}  # messages of equal size, so that stale values are used
ONE_PROCESS: dict[str, dict[str, Any]] = {
    "virtual ranks with dropout": {"tensor_parallel_size": 4, "dropout": 0.1, "patience": 5},
    "stale": {"tensor_parallel_size": 2, "repair": "stale", **EQUAL_LENGTHS},
    "own streams that drift": {
        "tensor_parallel_size": 2,
        "reliable_gather": False,
        "replicated_gradients": "none",
        "resync_every": 4,
    },
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
