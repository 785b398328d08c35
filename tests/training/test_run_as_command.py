"""Test what a command prints, and how it ends, if something goes wrong."""

import io
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from lossytp import train
from lossytp.parallel import backend as initialize
from lossytp.training import command_line, loop
from lossytp.training.command_line import run_as_command


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        *("train --loss_rate 1.5", "train --nonsense", "train --output_dir /dev/null/below", "train --dataset nope"),
        *("study.grid one", "study.run in out --parameter", "study.run in out more"),
    ],
)
def test_the_entry_point_ends_with_one_line_and_exit_code_2(command):
    words = [sys.executable, "-m", *f"lossytp.{command}".split()]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    told = [line for line in result.stderr.splitlines() if not line.startswith("importing ")]  # on a slow machine
    assert len(told) == 1
    assert told[0].startswith("error: ")
    assert result.stdout == ""


def test_an_ascii_terminal_gets_errors_without_a_box(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    command = [sys.executable, "-m", "lossytp.train", "--loss_rate", "x"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stderr.count("---"), run.stderr.count("\n")) == (2, 0, 1)
    assert "loss_rate" in run.stderr


def test_what_a_terminal_cannot_show_is_printed_as_escapes_not_taken_for_an_error(monkeypatch, tmp_path):
    """A finished run whose folder's name cannot be shown has a record all the same."""
    final, data = (
        {"score_lossy": 0.5, "score_clean": 0.5},
        {"metric": "accuracy", "chance": 0.5, "majority_share": None},
    )
    record: dict[str, Any] = {"status": "finished", "final": final, "data": {**data, "subsets": {}}}
    monkeypatch.setattr(loop, "run", lambda config: record)
    monkeypatch.setattr(sys, "argv", ["train", "--output_dir", f"{tmp_path}/数据"])
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(command_line, "_leave", lambda code: code)
    monkeypatch.setattr(command_line, "_reader_left", lambda: terminal.flush())
    run_as_command(train.main)
    shown = terminal.buffer.getvalue().decode()
    assert shown.endswith("(finished): see " + rf"{tmp_path}/\u6570\u636e/record.json" + "\n")
    record |= {"status": "not finite", "timing": {"steps": 2}}
    monkeypatch.setattr(sys, "argv", ["train", "--save_model", "--output_dir", str(tmp_path)])
    run_as_command(train.main)
    ends = f"the training loss was not finite at step 2: see {tmp_path}/record.json\n"  # there is no model
    assert terminal.buffer.getvalue().decode().endswith(ends)


@pytest.fixture
def run_failing_command(monkeypatch, tmp_path, capsys):
    """Return `run_failing_command(error, joined, **variables)`, which runs a command that raises the error.

    It returns the exit code and the printed text.
    """

    def run(error, joined=False, **variables):
        for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(initialize, "_settings", object() if joined else None)
        monkeypatch.setattr(os, "_exit", sys.exit)

        def fail():
            raise error

        with pytest.raises(SystemExit) as stop:
            run_as_command(fail)
        output = capsys.readouterr()
        assert output.out == ""
        return stop.value.code, output.err

    return run


@pytest.mark.slow
def test_one_of_several_processes_ends_before_python_shuts_down():
    """Gloo's threads would still be alive, and now and then abort."""
    script = "import atexit; from lossytp.training.command_line import run_as_command; "
    script += "atexit.register(print, 'down'); run_as_command(lambda: print('done'))"
    for rank, said in (({"RANK": "1"}, "done\n"), ({}, "done\ndown\n")):
        environment = {name: value for name, value in os.environ.items() if name != "RANK"} | rank
        run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert (run.returncode, run.stdout) == (0, said)


@pytest.mark.parametrize("error", [ValueError("loss_rate = 2"), ModuleNotFoundError("loss_rate = 2")])
def test_an_error_names_its_rank_if_there_are_several(run_failing_command, error):
    assert run_failing_command(error) == (2, "error: loss_rate = 2\n")
    assert run_failing_command(error, RANK="0", LOCAL_RANK="0") == (2, "rank 0: error: loss_rate = 2\n")
    assert run_failing_command(error, RANK="5") == (2, "rank 5: error: loss_rate = 2\n")
    assert run_failing_command(error, LOCAL_RANK="1") == (2, "error: loss_rate = 2\n"), (
        "one process, whatever is left of others"
    )


@pytest.mark.slow
def test_an_error_that_all_processes_of_a_node_share_is_printed_by_the_first(run_failing_command):
    error = ValueError("loss_rate = 2")
    assert run_failing_command(error, RANK="3", LOCAL_RANK="1", TORCHELASTIC_RUN_ID="1") == (2, "")
    assert run_failing_command(error, RANK="2", LOCAL_RANK="0") == (2, "rank 2: error: loss_rate = 2\n")
    told = (2, "rank 3: error: loss_rate = 2\n")
    assert run_failing_command(error, joined=True, RANK="3", LOCAL_RANK="1", TORCHELASTIC_RUN_ID="1") == told
    assert run_failing_command(error, RANK="3", LOCAL_RANK="1") == told, "started by hand, maybe with other settings"


def test_an_unforeseen_error_keeps_its_traceback(run_failing_command):
    code, text = run_failing_command(KeyError("weight"), joined=True, RANK="1", LOCAL_RANK="1")
    assert code == 1
    assert text.startswith("Traceback")
    assert text.endswith("rank 1: error: KeyError: 'weight'\n")


def test_an_unforeseen_error_of_a_single_process_is_raised(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    def fail():
        raise KeyError("weight")

    with pytest.raises(KeyError, match="weight"):
        run_as_command(fail)


@pytest.mark.parametrize(
    "sign", ["Connection closed by peer", "Connection reset by peer", "was likely closed", "Broken pipe"]
)
def test_a_lost_connection_is_one_line(run_failing_command, sign):
    code, text = run_failing_command(
        RuntimeError(f"[pair.cc] {sign} [127.0.0.1]\nmore"), joined=True, RANK="1", LOCAL_RANK="1"
    )
    reason = f"the connection to another process is lost: see why that one ended ([pair.cc] {sign} [127.0.0.1])"
    assert (code, text) == (1, f"rank 1: error: {reason}\n")


def test_a_lost_connection_is_dated_after_the_error_that_caused_it(run_failing_command, tmp_path, monkeypatch):
    """torchrun calls the earliest error the root cause; within a second, that of the lowest rank."""
    monkeypatch.setattr(time, "time", lambda: 100.9)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    seconds = []
    for rank, error in enumerate((RuntimeError("[pair.cc] Connection closed by peer [127.0.0.1]"), ValueError("why"))):
        file = tmp_path / f"{rank}.json"
        run_failing_command(error, RANK=str(rank), LOCAL_RANK=str(rank), TORCHELASTIC_ERROR_FILE=str(file))
        seconds.append(json.loads(file.read_text())["message"]["extraInfo"]["timestamp"])
    assert seconds == ["101", "100"]


def test_a_keyboard_interrupt_exits_with_130(run_failing_command):
    assert run_failing_command(KeyboardInterrupt(), RANK="0") == (130, "")
