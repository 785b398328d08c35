import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from lossytp.training.command_line import parse, run_as_command
from lossytp.training.config import EvaluateConfig, TrainConfig


def test_flags_of_the_earlier_study_with_dashes_and_underscores_alike():
    words = ["--tensor_parallel_size", "2", "--loss-type", "g-e", "--ge_config", "one"]
    words += ["--max-steps", "5", "--seed", "7", "--fp16"]
    config = parse(TrainConfig, None, words)
    assert (config.network.tensor_parallel_size, config.network.loss_type, config.network.ge_config) == (
        2,
        "g-e",
        "one",
    )
    assert (config.optimizer.max_steps, config.network.seed, config.compute.fp16) == (5, 7, True)


def test_a_null_is_no_default(tmp_path):
    """null turns off the default of checkpoint_steps; max_samples is null by default and needs no flag."""
    (tmp_path / "run.yaml").write_text("checkpoint_steps: null\nmax_samples: null\n")
    config = parse(TrainConfig, None, ["--config", str(tmp_path / "run.yaml")])
    assert TrainConfig().output.checkpoint_steps is not None
    assert config == TrainConfig(checkpoint_steps=None)


def test_yaml_file_with_flags_on_top(tmp_path):
    (tmp_path / "run.yaml").write_text("loss_rate: 0.25\nmax_steps: 9\n")
    config = parse(TrainConfig, None, ["--config", str(tmp_path / "run.yaml"), "--max_steps", "10"])
    assert (config.network.loss_rate, config.optimizer.max_steps) == (0.25, 10)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--los_rate", "0.1"], "unknown parameter 'los_rate': did you mean loss_rate?"),
        (["--loss_rate", "2"], "loss_rate"),
        (["--loss_rate", "much"], "much"),
        (["--loss_rate", "0.1", "--loss-rate", "0.2"], "--loss_rate is given twice"),
        (["--reliable_gather", "--no-reliable_gather"], "--reliable_gather is given twice"),
        (["--loss_type", "burst"], "burst"),
        (["--max_steps"], "--max_steps has no value"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--config"], "--config has no value"),
        (["stray"], "stray belongs to no flag"),
        (["--lossy_layers", "5:2"], "the one after the last, such as (0, 2), or 0:2 as a flag"),
        (["--model_name", "nano"], "choose one of gpt2-nano, gpt2-nano-wide-scratch, gpt2-nano-deep-scratch, gpt2-m"),
        (["--reliable_gather", "False"], "False belongs to no flag"),
        (["--save-model=yes"], "--save_model is a switch"),
        (["--patience", "1.5"], "patience = '1.5'"),
        (["--target_accuracy", "much"], "target_accuracy = 'much'"),
        (["--schedule", "x"], "schedule = 'x' is unknown"),
        (["--dataset", "x/" * 30], f"dataset = '{'x/' * 30}' is unknown"),
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


def test_a_record_of_given_weights_needs_them_again(tmp_path):
    record = {"config": TrainConfig().as_dict(), "first_weights": {"file": "w.pth", "sha256": "0123456789ab"}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    words = ["--config", str(tmp_path / "record.json")]
    message = r"began from the weights w\.pth \(sha256 01234567\.\.\.\): give their path as --checkpoint_path$"
    with pytest.raises(ValueError, match=message):
        parse(TrainConfig, None, words)
    assert parse(TrainConfig, None, [*words, "--checkpoint_path", "w.pth"]).output.checkpoint_path == "w.pth"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--repair", "fec(10, 8, depth=2)"], {"repair": "fec(10, 8, depth=2)"}),
        (["--repair=hadamard(block=16)"], {"repair": "hadamard(block=16)"}),
        (["--no-reliable-gather"], {"reliable_gather": False}),
        (["--no_reliable_gather"], {"reliable_gather": False}),
        (["--reliable_gather", "--sequence-parallel"], {"sequence_parallel": True}),
        (
            ["--lossy_links", "-1>0,0>-1", "--algorithm", "switch", "--no_reliable_gather"],
            {"lossy_links": "-1>0,0>-1", "algorithm": "switch", "reliable_gather": False},
        ),
        (["--lossy-layers", "1:3", "--lossy-phase", "reduce"], {"lossy_layers": "1:3", "lossy_phase": "reduce"}),
        (
            ["--no_reliable_gather", "--replicated-gradients", "none", "--resync_every", "5"],
            {"reliable_gather": False, "replicated_gradients": "none", "resync_every": 5},
        ),
        (["--wire_dtype", "bf16", "--control", "elements"], {"wire_dtype": "bf16", "control": "elements"}),
        (["--wire-dtype", "int4", "--ranks-per-node", "2"], {"wire_dtype": "int4", "ranks_per_node": 2}),
    ],
)
def test_the_comm_config_from_flags_and_from_the_record_that_they_lead_to(tmp_path, words, expected):
    config = parse(TrainConfig, None, words)
    assert config.changes() == expected
    (tmp_path / "record.json").write_text(json.dumps({"config": config.as_dict(), "final": {}}))
    assert parse(TrainConfig, None, ["--config", str(tmp_path / "record.json")]) == config
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(expected))
    assert parse(TrainConfig, None, ["--config", str(tmp_path / "run.yaml")]) == config


def test_a_flag_overrides_a_switch_of_the_file(tmp_path):
    (tmp_path / "run.yaml").write_text("reliable_gather: false\nrepair: rescale\n")
    config = parse(TrainConfig, None, ["--config", str(tmp_path / "run.yaml"), "--reliable-gather"])
    assert config.changes() == {"repair": "rescale"}


def test_a_flag_may_set_what_a_file_leaves_out(tmp_path):
    (tmp_path / "run.yaml").write_text("loss_type: g-e\nloss_rate: 0.05\n")
    config = parse(TrainConfig, None, ["--config", str(tmp_path / "run.yaml"), "--mean_burst_packets", "8"])
    assert config.network.process().mean_burst_packets == pytest.approx(8)


@pytest.mark.parametrize("prompt", ["--seed", "--seed=7", "-1", "a = b", " "])
def test_a_value_of_the_file_that_looks_like_a_flag_is_a_value(tmp_path, prompt):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"prompt": prompt}))
    assert parse(EvaluateConfig, None, ["--config", str(tmp_path / "run.yaml")]).changes() == {"prompt": prompt}


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes("output_dir: Läufe".encode("latin-1"))
    with pytest.raises(ValueError, match=r"run\.yaml is not UTF-8 at byte 13") as error:
        parse(TrainConfig, None, [f"--config={file}"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bf16: 1", "bf16 = 1 is of the wrong type"),
        ("bf16: no", "bf16 = 'no' is of the wrong type"),
        ("output_dir: null", "output_dir = None is of the wrong type"),
        ("output_dir: 2024", "output_dir = 2024 is of the wrong type"),
        ("seed: 1:30", "seed = '1:30' is of the wrong type"),
        ("loss_rate: 0.1\nseed: 1\nloss_rate: 0.2", "run.yaml: cannot be read as YAML (found duplicate key"),
        ("seed: 1\nmax_steps: [1\nloss_rate: 0.2", "but got ':'): mend line 3"),
        ("- 1", "run.yaml holds no parameters"),
        ("loss_rate: 3", "loss_rate = 3"),
        ("los_rate: 0.1", "run.yaml: unknown parameter 'los_rate': did you mean loss_rate?"),
    ],
)
def test_mistakes_that_yaml_lets_pass_are_named(tmp_path, text, words):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        parse(TrainConfig, None, ["--config", str(tmp_path / "run.yaml")])
    assert "\n" not in str(error.value)


def test_plain_words_of_a_file_mean_what_they_look_like(tmp_path):
    """YAML 1.1 would read a date, 8, a text and 63 instead."""
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: 2024-01-01\nseed: 010\nlearning_rate: 1e-4\nlossy_layers: 1:3\n")
    config = parse(TrainConfig, None, ["--config", str(file)])
    expected = {"output_dir": "2024-01-01", "seed": 10, "learning_rate": 1e-4, "lossy_layers": "1:3"}
    assert config.changes() == expected


def test_a_files_own_values_win_over_merged_ones(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("loss_rate: 0.1\n<<: {seed: 3, loss_rate: 0.2}\n")
    config = parse(TrainConfig, None, ["--config", str(file)])
    assert (config.network.loss_rate, config.network.seed) == (0.1, 3)


def test_a_record_is_run_again_only_by_as_many_processes(tmp_path, monkeypatch):
    """Another number of processes draws other losses, and would silently give another result."""
    (tmp_path / "record.json").write_text(json.dumps({"config": TrainConfig().as_dict(), "processes": 2}))
    words = ["--config", str(tmp_path / "record.json")]
    with pytest.raises(ValueError, match=r"of a run on 2 processes, not 1: start it with torchrun --nproc_per_node 2"):
        parse(TrainConfig, None, words)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert parse(TrainConfig, None, words) == TrainConfig()
    monkeypatch.setenv("WORLD_SIZE", "abc")
    with pytest.raises(ValueError, match=r"^WORLD_SIZE = 'abc' is not a whole number: start with torchrun"):
        parse(TrainConfig, None, words)


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "main",
    [
        "for line in range(100_000): print(line)",  # the pipe is full
        "print(1); time.sleep(0.5); print(2)",  # nobody reads what is flushed at the end
        "print(1, flush=True); time.sleep(0.5); print(2, flush=True)",
        "print(1); time.sleep(0.5); print(2); raise SystemExit(0)",  # as --help
    ],
)
def test_a_reader_who_leaves_ends_the_command_silently(main, buffered):
    program = "import sys, time; from lossytp.training.command_line import run_as_command\n"
    program += f"def main():\n    {main}\nrun_as_command(main)"
    output, end = os.pipe()
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=end, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(end)
    os.close(output)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 141


def test_an_error_is_one_line_whatever_it_names(capsys):
    def refuse():
        raise ValueError("x = \x1b[2J\n\udcff is no number")

    with pytest.raises(SystemExit):
        run_as_command(refuse)
    assert capsys.readouterr().err == "error: x = \\x1b[2J\\n\\udcff is no number\n"


def test_another_broken_pipe_is_shown_whole():
    program = "from lossytp.training.command_line import run_as_command\n"
    program += "def main():\n    raise BrokenPipeError('a worker is gone')\nrun_as_command(main)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "BrokenPipeError: a worker is gone"


@pytest.mark.parametrize(("flag", "instead"), [("--link_gbits", "paper/timing"), ("--transport", "tests")])
def test_a_flag_that_is_gone_says_what_came_instead(flag, instead):
    with pytest.raises(ValueError, match=f"{flag} is not supported: .*{instead}"):
        parse(TrainConfig, None, [flag, "1"])
