"""Test curves and lines to watch while a run trains."""

import json
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lossytp.training import logs, loop, progress
from lossytp.training.logs import STATISTICS, StatisticsFile
from lossytp.training.loop import run
from lossytp.training.progress import Progress, waiting
from tests.training.test_checkpoint import Stopped


def stopped_and_resumed(toy, monkeypatch, **values: Any) -> dict:
    values = {"checkpoint_steps": 2, "eval_steps": 3, "gradient_clipping": 1.0, "loss_rate": 0.1, **values}
    with monkeypatch.context() as patched:
        patched.setattr("lossytp.training.loop.Run._evaluate", lambda *_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            run(toy(**values))
    return run(toy(**values))


def test_tensorboard_has_every_step_once_even_if_resumed(toy, tmp_path, monkeypatch):
    record = stopped_and_resumed(toy, monkeypatch, tensorboard=True)
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    names = set(board.Tags()["scalars"])
    train = {"train/loss", "train/learning_rate", "train/gradient_norm", "train/tokens_per_second"}
    assert train | {"eval/accuracy_lossy", "eval/accuracy_clean"} <= names
    for name in train:
        assert [event.step for event in board.Scalars(name)] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in board.Scalars("eval/accuracy_lossy")] == [3, 6]
    told = [event.value for event in board.Scalars("train/loss")]
    assert told == pytest.approx([point["loss"] for point in record["curves"]["train_loss"]])
    rates = [event.value for event in board.Scalars("train/learning_rate")]
    assert rates == pytest.approx([1e-3 * step / 20 for step in range(1, 7)])


@pytest.mark.slow
def test_wandb_continues_its_run(toy, tmp_path, monkeypatch):
    runs: list[dict] = []
    logged: list[dict] = []
    of_run = SimpleNamespace(log=logged.append, finish=lambda: None, define_metric=lambda *_, **__: None)
    fake = SimpleNamespace(init=lambda **settings: runs.append(settings) or of_run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(logs.importlib.util, "find_spec", lambda name: name)
    stopped_and_resumed(toy, monkeypatch, wandb=True)
    assert len(runs) == 2
    assert runs[0]["id"] == runs[1]["id"]
    assert runs[1]["config"]["wandb"] is True
    assert [each["step"] for each in logged if "train/loss" in each] == [1, 2, 3, 3, 4, 5, 6]
    stopped_and_resumed(toy, monkeypatch, wandb=True, output_dir=str(tmp_path / "other"))
    assert runs[2]["id"] != runs[0]["id"]


def test_logs_are_written_only_if_asked_for_and_by_one_process(toy, tmp_path):
    run(toy(max_steps=1))
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["record.json"]
    other = logs.Logs(toy(tensorboard=True, output_dir=str(tmp_path / "other")), shown=False)
    other.write(1, {"train/loss": 1.0})
    other.close()
    assert not (tmp_path / "other").exists()


def test_progress_resumes_and_shows_evaluations(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    point = {"step": 8, "accuracy_lossy": 0.5, "accuracy_clean": 0.75, "accuracy_spread_lossy": 0.0, "f1_clean": None}
    shown = Progress(10, done=7)
    shown.show(8, 0.25)
    shown.evaluated(8, point)
    shown.evaluated(10, point)
    assert capsys.readouterr().err.splitlines() == [
        "training: resumed after step 7 of 10",
        "training: step 8 of 10, loss 0.250",
        "evaluation: step 8 of 10, accuracy_lossy 0.5000, accuracy_clean 0.7500",
    ]
    Progress(10, done=7, shown=False).evaluated(8, point)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = Progress(10, done=7)
    bar.show(8, 0.25)
    bar.evaluated(8, point)
    assert "evaluation: step 8 of 10" in capsys.readouterr().err
    bar.close()  # a run that ends early leaves its bar, and later lines follow it
    assert capsys.readouterr().err.endswith("\n")


def lines_in(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def numbers(lines):
    return [{n: v for n, v in line.items() if "second" not in n} for line in lines]


def stopped(config, name):
    def stop(*_):
        raise KeyboardInterrupt

    with patch.object(loop, name, stop), pytest.raises(KeyboardInterrupt):
        run(config)


def test_there_is_a_line_for_each_step_and_each_evaluation(toy, tmp_path):
    record = run(toy(statistics=True, eval_steps=3, gradient_clipping=1.0))
    lines = lines_in(tmp_path / "run" / STATISTICS)
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval/accuracy_clean" in line] == [3, 6]
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6, 6]
    told = [line["train/loss"] for line in lines if "train/loss" in line]
    assert told == [point["loss"] for point in record["curves"]["train_loss"]]
    names = ("learning_rate", "gradient_norm", "tokens", "tokens_per_second", "waiting_seconds")
    assert all(f"train/{name}" in lines[0] for name in names)
    assert lines[1]["train/tokens"] > lines[0]["train/tokens"]


@pytest.mark.slow
def test_a_run_stopped_anywhere_and_resumed_has_each_line_once(toy, tmp_path):
    values = {"statistics": True, "checkpoint_steps": 2, "eval_steps": 2, "max_steps": 5}
    run(toy(**values, output_dir=str(tmp_path / "whole")))
    expected = lines_in(tmp_path / "whole" / STATISTICS)
    config = toy(**values)
    file = tmp_path / "run" / STATISTICS
    for _ in range(2):
        stopped(config, "write_record")  # all lines are there, and the last checkpoint is of step 4
        assert len(lines_in(file)) == len(expected)
    run(config)
    assert numbers(lines_in(file)) == numbers(expected)


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path):
    file = StatisticsFile(tmp_path / STATISTICS)
    file.write(1, {"train/loss": 0.5})
    assert lines_in(tmp_path / STATISTICS) == [{"step": 1, "train/loss": 0.5}]
    file.write(2, {})
    file.write(2, {"train/loss": 0.25})
    file.close()
    assert [line["step"] for line in lines_in(tmp_path / STATISTICS)] == [1, 2]


def test_lines_after_the_checkpoint_and_half_lines_are_replaced(tmp_path):
    path = tmp_path / STATISTICS
    path.write_text('{"step": 1, "train/loss": 1}\n{"step": 1, "eval/f1": 0}\n{"step": 2, "train/loss": 2}\n{"ste')
    file = StatisticsFile(path, done=1)
    for step in (1, 2):
        file.write(step, {"train/loss": 7})
        file.write(step, {"eval/f1": 1})
    file.close()
    assert path.read_text().splitlines() == [
        '{"step": 1, "train/loss": 1}',
        '{"step": 1, "eval/f1": 0}',
        '{"step": 2, "train/loss": 7}',
        '{"step": 2, "eval/f1": 1}',
    ]
    StatisticsFile(path).close()
    assert path.read_text() == "", "a run that begins anew keeps nothing"


@pytest.mark.parametrize("content", [b"my notes\n", b"[1]\n", b"\xff\n"])
def test_a_users_file_is_refused_before_the_first_step_and_stays(toy, tmp_path, monkeypatch, content):
    monkeypatch.setattr(loop, "Run", None)  # fails if it runs
    file = tmp_path / "run" / STATISTICS
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{STATISTICS} is in the way, and this program did not write it: move it"):
        run(toy(statistics=True))
    assert file.read_bytes() == content


@pytest.mark.parametrize(("rank", "seconds", "told"), [(0, 0.3, True), (1, 0.3, False), (0, 0.0, False)])
def test_one_process_says_what_takes_long_until_it_ends(monkeypatch, capsys, rank, seconds, told):
    monkeypatch.setattr(progress, "SECONDS_OF_SILENCE", 0.05)
    monkeypatch.setattr(progress, "rank_and_world_size", lambda: (rank, 2))
    with waiting("reading"):
        time.sleep(seconds)
    lines = capsys.readouterr().err.splitlines()
    assert bool(lines) == told
    assert all(line.startswith("reading: ") for line in lines)
    time.sleep(0.15)
    assert capsys.readouterr().err == ""
