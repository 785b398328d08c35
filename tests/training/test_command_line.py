"""Test flags, YAML files and records as configurations, and what a command says."""

import json
import math
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from lossytp.training.command_line import parse, read_yaml, run_as_command
from lossytp.training.config import EvaluateConfig, TrainConfig


@pytest.fixture
def given(tmp_path):
    """Return `given(content, *flags)`, which reads a YAML file of this text, or a record, and flags."""

    def read(content, *flags, kind=TrainConfig):
        file = tmp_path / ("run.yaml" if isinstance(content, str) else "record.json")
        file.write_text(content if isinstance(content, str) else json.dumps({"final": {}, **content}))
        return parse(kind, None, ["--config", str(file), *flags])

    return read


def test_flags_of_the_earlier_study_with_dashes_and_underscores_alike():
    words = ["--tensor_parallel_size", "2", "--loss-type", "g-e", "--ge_config", "one"]
    config = parse(TrainConfig, None, [*words, "--max-steps", "5", "--seed", "7", "--fp16"])
    expected = {"tensor_parallel_size": 2, "loss_type": "g-e", "ge_config": "one", "max_steps": 5, "seed": 7}
    assert config.changes() == expected | {"fp16": True}


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("loss_rate: 0.25\nmax_steps: 9\n", ["--max_steps", "10"], {"loss_rate": 0.25, "max_steps": 10}),
        ("checkpoint_steps: null\nmax_samples: null\n", [], {"checkpoint_steps": None}),  # whose default is a number
        ("reliable_gather: false\nrepair: rescale\n", ["--reliable-gather"], {"repair": "rescale"}),
        (  # which the file alone would not allow
            "loss_type: g-e\nloss_rate: 0.05\n",
            ["--mean_burst_packets", "8"],
            {"loss_type": "g-e", "loss_rate": 0.05, "mean_burst_packets": 8.0},
        ),
    ],
)
def test_flags_come_on_top_of_a_yaml_file(given, text, flags, expected):
    assert given(text, *flags).changes() == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--los_rate", "0.1"], "unknown parameter 'los_rate': did you mean loss_rate?"),
        (["--loss_rate", "much"], "much"),
        (["--loss_rate", "0.1", "--loss-rate", "0.2"], "--loss_rate is given twice"),
        (["--reliable_gather", "--no-reliable_gather"], "--reliable_gather is given twice"),
        *(([flag], f"{flag} has no value") for flag in ("--max_steps", "--config")),
        (["--config", "missing.yaml"], "missing.yaml"),
        *((words, f"{words[-1]} belongs to no flag") for words in (["stray"], ["--reliable_gather", "False"])),
        *((["--lossy_layers", "5:2"], "or 0:2 as a flag"), (["--model_name", "nano"], "choose one of gpt2-nano")),
        *((["--save-model=yes"], "--save_model is a switch"), (["--patience", "1.5"], "patience = '1.5'")),
        *(([flag, "1"], f"{flag} is not supported: ") for flag in ("--link_gbits", "--transport")),
    ],
)
def test_errors_are_one_line(words, expected):
    with pytest.raises(ValueError, match=re.escape(expected)) as error:
        parse(TrainConfig, None, words)
    assert "\n" not in str(error.value)


def test_a_record_of_given_weights_needs_them_again(given):
    record = {"config": TrainConfig().as_dict(), "first_weights": {"file": "w.pth", "sha256": "0123456789ab"}}
    with pytest.raises(ValueError, match=r"w\.pth \(sha256 01234567\.\.\.\): give their path as --checkpoint_path$"):
        given(record)
    assert given(record, "--checkpoint_path", "w.pth").output.checkpoint_path == "w.pth"


SWITCHED = {"lossy_links": "-1>0,0>-1", "algorithm": "switch", "reliable_gather": False}
DRIFTING = {"reliable_gather": False, "replicated_gradients": "none", "resync_every": 5}
BURSTY = {"learning_rate": 3e-5, "bf16": True, "loss_type": "g-e", "loss_rate": 0.1, "mean_burst_packets": 8.0}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--learning_rate 3e-5 --bf16 --loss_type g-e --loss_rate 0.1 --mean_burst_packets 8", BURSTY),
        ("--repair 'fec(10, 8, depth=2)'", {"repair": "fec(10, 8, depth=2)"}),
        ("--repair='hadamard(block=16)'", {"repair": "hadamard(block=16)"}),
        ("--reliable_gather --sequence-parallel", {"sequence_parallel": True}),
        ("--lossy_links '-1>0,0>-1' --algorithm switch --no_reliable_gather", SWITCHED),
        ("--lossy-layers 1:3 --lossy-phase reduce", {"lossy_layers": "1:3", "lossy_phase": "reduce"}),
        ("--no-reliable-gather --replicated-gradients none --resync_every 5", DRIFTING),
        ("--wire-dtype int4 --ranks-per-node 2", {"wire_dtype": "int4", "ranks_per_node": 2}),
    ],
)
def test_settings_from_flags_from_a_file_and_from_the_record_that_they_lead_to(given, line, expected):
    config = parse(TrainConfig, None, shlex.split(line))
    assert config.changes() == expected
    assert given({"config": config.as_dict()}) == given(yaml.safe_dump(expected)) == config


@pytest.mark.parametrize("prompt", ["--seed", "--seed=7", "-1", "a = b", " "])
def test_a_value_of_the_file_that_looks_like_a_flag_is_a_value(given, prompt):
    assert given(yaml.safe_dump({"prompt": prompt}), kind=EvaluateConfig).changes() == {"prompt": prompt}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(("bf16: no", "bf16 = 'no' is of the wrong type"), ("seed: 1:30", "seed = '1:30' is of the wrong type")),
        ("loss_rate: 0.1\nseed: 1\nloss_rate: 0.2", "run.yaml: cannot be read as YAML (found duplicate key"),
        ("seed: 1\nmax_steps: [1\nloss_rate: 0.2", "but got ':'): mend line 3"),
        ("- 1", "run.yaml holds no parameters"),
        ("los_rate: 0.1", "run.yaml: unknown parameter 'los_rate': did you mean loss_rate?"),
    ],
)
def test_mistakes_that_yaml_lets_pass_are_named(given, text, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        given(text)
    assert "\n" not in str(error.value)


def test_a_record_is_run_again_only_by_as_many_processes(given, monkeypatch):
    """Another number of processes draws other losses, and would silently give another result."""
    record = {"config": TrainConfig().as_dict(), "processes": 2}
    with pytest.raises(ValueError, match=r"of a run on 2 processes, not 1: start it with torchrun --nproc_per_node 2"):
        given(record)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert given(record) == TrainConfig()
    monkeypatch.setenv("WORLD_SIZE", "abc")
    with pytest.raises(ValueError, match=r"^WORLD_SIZE = 'abc'"):
        given(record)


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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("010", 10), ("!!int 010", 10), ("+3", 3), ("1.0", 1.0), ("1e-3", 1e-3), (".5", 0.5), ("-.inf", -math.inf)),
        *((text, text) for text in ("1:30", "2024-01-01", "no", "on")),
        *(("true", True), ("null", None), ("~", None), ("", None), ("a:", {"a": None})),
        ("{<<: {a: 1, b: 2}, b: 3}", {"a": 1, "b": 3}),
    ],
)
def test_a_plain_word_means_what_it_looks_like(text, value):
    found = read_yaml(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("module", ["lossytp.train", "lossytp.tolerance"])
def test_help_names_the_command_as_it_is_typed_and_gives_each_example_a_line(module):
    shown = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True).stdout
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0] == f"usage: python -m {module} [-h] [OPTIONS]"
    examples = [line for line in lines if line.startswith(f"python -m {module} ")]
    assert len(examples) == 2
    assert "NONETYPE" not in shown
    assert ".:" not in shown
    assert all(line.count("python -m") == 1 for line in examples)
