"""Test the lines of JSON that a run writes while it goes on."""

import json
from unittest.mock import patch

import pytest

from lossytp.training import loop
from lossytp.training.logs import STATISTICS, StatisticsFile, written_lines
from lossytp.training.loop import run


def lines_in(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def numbers(lines):
    """Return the lines without seconds, which differ between runs."""
    return [{n: v for n, v in line.items() if "second" not in n} for line in lines]


def stopped(config, name):
    """Run, and interrupt the run as it calls a function of the loop."""

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


@pytest.mark.parametrize("content", [b"my notes\n", b"[1]\n", b'{"step": 1}\n', b"\xff\n"])
def test_a_users_file_is_refused_before_the_first_step_and_stays(toy, tmp_path, monkeypatch, content):
    monkeypatch.setattr(loop, "Run", None)  # fails if it runs
    file = tmp_path / "run" / STATISTICS
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{STATISTICS} is in the way, and this program did not write it: move it"):
        run(toy(statistics=True))
    assert file.read_bytes() == content


def test_a_full_disk_is_one_line(tmp_path):
    file = StatisticsFile(tmp_path / STATISTICS)
    with patch.object(file, "_file") as full:
        full.write.return_value = 3
        with pytest.raises(ValueError, match=rf"{STATISTICS} cannot be written \(No space left.*\): make room"):
            file.write(1, {"train/loss": 0.5})
    file.close()
    assert written_lines(tmp_path / STATISTICS) == {}
