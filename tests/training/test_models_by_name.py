"""Test what is known of a model by its name, before it is loaded, and models that are nowhere."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest

from lossytp.training import models
from lossytp.training.models import check_model, check_there, load_tokenizer, shape_of
from tests.training.tasks.test_sources import hub_at

TINY = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}


def test_the_hubs_shapes_are_those_of_its_files():
    where = Path(os.environ.get("LOSSYTP_DATA", "")) / "openai-community" / "gpt2"
    if "LOSSYTP_DATA" not in os.environ or not where.is_dir():
        pytest.skip("GPT-2's configuration is not under LOSSYTP_DATA")
    assert shape_of(str(where)) == shape_of("gpt2")


@pytest.mark.parametrize(
    ("name", "size", "length", "message"),
    [
        ("gpt2-xl", 4, 64, "tensor_parallel_size = 4 .*25"),
        ("openai-community/gpt2-xl", 2, 64, "tensor_parallel_size = 2 .*25"),
        ("gpt2-nano", 16, 64, "tensor_parallel_size = 16 .*8"),
        ("gpt2-nano-scratch", 2, 129, "max_length = 129 is above gpt2-nano-scratch's 128 positions"),
        ("gpt2-nanno", 2, 64, "model_name = 'gpt2-nanno'.*gpt2-nano"),
        ("./nowhere/", 2, 64, "model_name = './nowhere/'"),
    ],
)
def test_impossible_models_are_refused_before_anything_is_loaded(monkeypatch, name, size, length, message):
    monkeypatch.setattr(models, "_loaded", lambda *_, **__: pytest.fail("something is loaded"))
    with pytest.raises(ValueError, match=message) as error:
        check_model(name, size, length)
    assert "\n" not in str(error.value)


def test_a_shape_is_checked_without_torch():
    script = "import sys; from lossytp.training.config import TrainConfig; TrainConfig(model_name='gpt2-large'); "
    script += "print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"


def test_a_folder_that_holds_no_decoder_is_named(tmp_path):
    sizes = {"model_type": "gpt2", **TINY}
    wrong = [{}, [], None, {"model_type": "bert"}, {**sizes, "n_embd": "16"}, {**sizes, "n_head": 0}]
    for content in ("no json", *map(json.dumps, [*wrong, {**sizes, "n_head": 2.0}, {**sizes, "n_layer": True}])):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="holds no decoder") as error:
            check_model(str(tmp_path), 2, 64)
        assert "\n" not in str(error.value)
        assert "config.json" in str(error.value)


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, tmp_path):
    """The hub's client would try for nearly a minute."""
    monkeypatch.delenv("LOSSYTP_DATA", raising=False)
    hub_at("http://127.0.0.1:9", monkeypatch)  # nothing listens at this port
    start = time.perf_counter()
    with pytest.raises(
        ValueError, match=r"some/gpt2 is neither on this machine .* nor available from the hub \(.*: give a"
    ):
        load_tokenizer("some/gpt2")
    assert time.perf_counter() - start < 10
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_a_missing_model_is_refused_before_torch_is_imported(monkeypatch, tmp_path):
    monkeypatch.delenv("LOSSYTP_DATA", raising=False)
    hub_at("http://127.0.0.1:9", monkeypatch)
    for name in ("some/gpt2", "gpt2-large", "gpt2-large-scratch"):
        with pytest.raises(ValueError, match="nor available from the hub"):
            check_there(name)
    for name in ("gpt2-nano", "gpt2-micro", "gpt2-nano-scratch", "gpt2-nano-wide-scratch", "gpt2-micro-scratch"):
        check_there(name)
    with pytest.raises(ValueError, match="or give gpt2-nano-wide-scratch"):
        check_there("gpt2-nano-wide")  # no weights of it are committed
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "gpt2-nano").symlink_to(models.MODELS / "gpt2-nano")
    monkeypatch.setattr(models, "MODELS", tmp_path / "models")
    check_there("gpt2-micro-scratch")  # needs only the vocabulary
    with pytest.raises(ValueError, match=r"run \./run_all\.sh pretrain in a checkout, or give gpt2-micro-scratch"):
        check_there("gpt2-micro")
    folder = tmp_path / "openai-community" / "gpt2-large"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("LOSSYTP_DATA", str(tmp_path))
    check_there("gpt2-large-scratch")
    with pytest.raises(ValueError, match="nor available from the hub"):
        check_there("gpt2-large")
    (folder / "pytorch_model.bin").touch()
    check_there("gpt2-large")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOSSYTP_DATA", "~")
    check_there("gpt2-large")


def test_no_hub_and_no_data_end_the_command_with_one_line():
    left_out = ("HF_HUB_OFFLINE", "LOSSYTP_DATA", "RANK")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    variables |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "/nonexistent"}
    command = [sys.executable, "-m", "lossytp.train", "--model_name", "gpt2", "--tensor_parallel_size", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr  # the hub's client would print a line for each try
    message = "error: model_name = 'gpt2': openai-community/gpt2 is neither on this machine (LOSSYTP_DATA is not set)"
    assert result.stderr.startswith(message)


def test_the_first_line_of_an_error_has_words():
    """Some errors begin with an empty line."""
    assert models.first_line(ImportError("\nwhy\nand how")) == "ImportError: why"
    assert models.first_line(KeyError()) == "KeyError: "
    assert (
        models.first_line(TypeError("of field 'n_embd':\n    got str\nmore")) == "TypeError: of field 'n_embd': got str"
    )
