"""Check that torchrun returns the record, or raises the failing rank's own error."""

import json
import signal

import pytest

from lossytp.study.torchrun import _reason, torchrun
from lossytp.training.config import TrainConfig

pytestmark = pytest.mark.slow

SUMMARY = """
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 42)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 42
"""


def test_the_reason_is_in_the_failing_ranks_own_words_or_torchruns():
    lines = [
        "rank 0: error: the connection to another process is lost: see why that one ended (Connection closed by peer)",
        "rank 1: error: ValueError: loss is not a number",
        *SUMMARY.splitlines(),
    ]
    assert _reason(lines) == "rank 1: error: ValueError: loss is not a number"
    lines = ["rank 0: error: the connection to another process is lost: see why that one ended (reset by peer)"]
    assert _reason([*lines, *SUMMARY.splitlines()]) == "rank 1: error: Signal 9 (SIGKILL) received by PID 42"
    assert _reason(lines) == lines[0]
    assert _reason(["Traceback", "OSError: no space left"]) == "OSError: no space left"
    assert _reason(["[0]: exit code 3", "=======", ""]) == "[0]: exit code 3"
    assert _reason([]) == "torchrun said nothing"


def test_a_run_on_two_processes_and_none_where_the_record_is_there(tmp_path, capfd, monkeypatch):
    config = TrainConfig(
        tensor_parallel_size=2,
        max_steps=2,
        batch_size=4,
        max_length=16,
        max_samples=50,
        eval_samples=20,
        output_dir=str(tmp_path / "run"),
    )
    record = torchrun(config)
    assert record["processes"] == 2
    assert record == json.loads((tmp_path / "run" / "record.json").read_text())
    assert "accuracy" in capfd.readouterr().err
    monkeypatch.setattr("subprocess.Popen", None)  # would fail if torchrun were started
    assert torchrun(config) == record
    with pytest.raises(ValueError, match=r"holds a run with .*loss_rate = 0\.0, not 0\.5"):
        torchrun(TrainConfig(tensor_parallel_size=2, loss_rate=0.5, output_dir=str(tmp_path / "run")))


def test_a_wrong_number_of_processes_ends_with_the_ranks_own_words(tmp_path):
    with pytest.raises(ValueError, match=r"rank \d: error: tensor_parallel_size = 2 cannot be spread .* 3 processes"):
        torchrun(TrainConfig(tensor_parallel_size=2, output_dir=str(tmp_path)), processes=3)
    assert not (tmp_path / "record.json").exists()


def test_an_interrupt_ends_the_processes(tmp_path, monkeypatch):
    launcher = tmp_path / "python"
    launcher.write_text("#!/bin/sh\nexec sleep 10\n")
    launcher.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(launcher))
    started = []

    def interrupted(run, passed):
        started.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr("lossytp.study.torchrun._pass_on", interrupted)
    with pytest.raises(KeyboardInterrupt):
        torchrun(TrainConfig(tensor_parallel_size=2, output_dir=str(tmp_path / "run")))
    assert started[0].wait(timeout=5) == -signal.SIGTERM
