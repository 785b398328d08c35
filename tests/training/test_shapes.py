"""Test the shapes that names and folders give before a model is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lossytp.training import models
from lossytp.training.shapes import check_model, shape_of

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
