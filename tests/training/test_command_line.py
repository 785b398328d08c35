import json
import re
import subprocess
import sys

import pytest

from lossytp.training.command_line import parse
from lossytp.training.config import TrainConfig


def test_flags_of_the_earlier_study_with_dashes_and_underscores_alike():
    words = ["--tensor_parallel_size", "2", "--loss-type", "g-e", "--ge_config", "one"]
    words += ["--max-steps", "5", "--seed", "7", "--fp16"]
    config = parse(TrainConfig, None, words)
    assert (config.tensor_parallel_size, config.loss_type, config.ge_config) == (2, "g-e", "one")
    assert (config.max_steps, config.seed, config.fp16) == (5, 7, True)


def test_yaml_file_with_flags_on_top(tmp_path):
    (tmp_path / "run.yaml").write_text("loss_rate: 0.25\nmax_steps: 9\n")
    config = parse(TrainConfig, None, ["--config", str(tmp_path / "run.yaml"), "--max_steps", "10"])
    assert (config.loss_rate, config.max_steps) == (0.25, 10)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--los_rate", "0.1"], "los"),
        (["--loss_rate", "2"], "[0, 1]"),
        (["--loss_rate", "much"], "much"),
        (["--loss_rate", "0.1", "--loss-rate", "0.2"], "2 times"),
        (["--loss_type", "burst"], "burst"),
        (["--max_steps"], "max-steps"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--config"], "no file"),
        (["stray"], "stray"),
    ],
)
def test_errors_are_one_line(words, expected):
    with pytest.raises(ValueError, match=re.escape(expected)) as error:
        parse(TrainConfig, None, words)
    assert "\n" not in str(error.value)


def test_the_configuration_of_a_record_is_read_with_small_floats_and_booleans(tmp_path):
    config = TrainConfig(learning_rate=3e-5, bf16=True, loss_type="g-e", loss_rate=0.1, mean_burst_packets=8.0)
    (tmp_path / "record.json").write_text(json.dumps({"config": config.as_dict(), "final": {}}))
    again = parse(TrainConfig, None, ["--config", str(tmp_path / "record.json")])
    assert again == config


def test_what_a_file_leaves_open_a_flag_may_settle(tmp_path):
    (tmp_path / "run.yaml").write_text("loss_type: g-e\nloss_rate: 0.05\n")
    config = parse(TrainConfig, None, ["--config", str(tmp_path / "run.yaml"), "--mean_burst_packets", "8"])
    assert config.process().mean_burst_packets == pytest.approx(8)


@pytest.mark.parametrize("text", ["loss_rate: [", "- 1", "los_rate: 0.1", "loss_rate: 3"])
def test_bad_yaml_is_refused(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"run\.yaml|los_rate|loss_rate") as error:
        parse(TrainConfig, None, [f"--config={file}"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "words", [["--loss_rate", "1.5"], ["--nonsense"], ["--output_dir", "/dev/null/below"], ["--dataset", "nope"]]
)
def test_the_entry_point_ends_with_one_line_and_exit_code_2(words):
    command = [sys.executable, "-m", "lossytp.train", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
