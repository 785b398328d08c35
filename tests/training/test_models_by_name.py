"""Test models that are neither on this machine nor on a hub that answers."""

import os
import subprocess
import sys
import time

import huggingface_hub
import pytest

from lossytp.training import models
from lossytp.training.models import check_there, load_tokenizer
from tests.training.tasks.test_sources import hub_at


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
    with pytest.raises(ValueError, match="give gpt2-nano-wide-scratch, or"):
        check_there("gpt2-nano-wide")  # no weights of it are committed
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "gpt2-nano").symlink_to(models.MODELS / "gpt2-nano")
    monkeypatch.setattr(models, "MODELS", tmp_path / "models")
    check_there("gpt2-micro-scratch")  # needs only the vocabulary
    with pytest.raises(ValueError, match=r"give gpt2-micro-scratch, or .*\./run_all\.sh pretrain gpt2-micro trains"):
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offline", "why"), [({}, "the hub does not answer"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")]
)
def test_no_hub_and_no_data_end_the_command_with_one_line(offline, why):
    left_out = ("HF_HUB_OFFLINE", "LOSSYTP_DATA", "RANK")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    variables |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "/nonexistent"} | offline
    command = [sys.executable, "-m", "lossytp.train", "--model_name", "gpt2", "--tensor_parallel_size", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr  # the hub's client would print a line for each try
    message = "error: model_name = 'gpt2': openai-community/gpt2 is neither on this machine (LOSSYTP_DATA is not set)"
    assert result.stderr.startswith(message)
    assert f"({why}" in result.stderr
