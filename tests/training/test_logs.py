import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lossytp.training import logs, progress
from lossytp.training.loop import run
from lossytp.training.progress import Progress
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


def test_wandb_that_is_not_installed_is_one_line_before_training(tmp_path):
    hidden = "import sys, importlib.util as util; find = util.find_spec\n"
    hidden += "util.find_spec = lambda name, *rest: None if name == 'wandb' else find(name, *rest)\n"
    code = hidden + "from lossytp import train\nfrom lossytp.training.command_line import run_as_command\n"
    code += "run_as_command(train.main)"
    command = [sys.executable, "-c", code, "--wandb", "--output_dir", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert ended.returncode == 2
    assert ended.stderr == "error: wandb = True needs wandb, which is not installed: pip install wandb\n"
    assert not (tmp_path / "run").exists()


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
    hidden = Progress(10, done=7, shown=False)
    hidden.evaluated(8, point)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = Progress(10, done=7)
    bar.show(8, 0.25)
    bar.evaluated(8, point)
    assert "evaluation: step 8 of 10" in capsys.readouterr().err
    bar.close()  # a run that ends early leaves its bar, and later lines follow it
    assert capsys.readouterr().err.endswith("\n")
