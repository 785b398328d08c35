"""Test folders whose files are not what their names say, whose code is not run, and models that are not there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from lossytp.training import models
from lossytp.training.config import PretrainConfig
from lossytp.training.models import (
    build_model,
    check_there,
    first_token_names,
    first_tokens,
    load_model,
    load_tokenizer,
)
from lossytp.training.shapes import check_model
from lossytp.training.text import encode, tokenizer_for, train_tokenizer
from tests.training.bos import BOS, with_bos
from tests.training.tasks.test_rows import hub_at

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
CODE = "open({marker!r}, 'w').close()\nfrom transformers import GPT2Config as C, GPT2TokenizerFast as T\n"
LOADS: dict[str, Callable[[str], Any]] = {
    "shape": lambda folder: check_model(folder, 2, 8),
    "tokenizer": load_tokenizer,
    "tokenizer_path": lambda folder: tokenizer_for(PretrainConfig(tokenizer_path=folder)),
    "model": load_model,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = train_tokenizer(["some words"], size=260)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


@pytest.mark.parametrize(
    ("file", "content", "told", "loads"),
    [
        ("model.safetensors", POINTER, "git LFS pointer", ["model"]),
        ("pytorch_model.bin", POINTER, "git LFS pointer", ["model"]),
        ("tokenizer.json", POINTER, "git LFS pointer", ["tokenizer", "tokenizer_path"]),
        ("tokenizer_config.json", POINTER, "git LFS pointer", ["tokenizer", "tokenizer_path"]),
        ("config.json", POINTER, "git LFS pointer", ["shape", "model"]),
        ("config.json", b"\xef\xbb\xbf{}", "byte order mark", ["shape", "model", "tokenizer"]),
        ("tokenizer.json", b"\xef\xbb\xbf{}", "byte order mark", ["tokenizer", "tokenizer_path"]),
        ("model.safetensors", b"", "empty, cut off or damaged", ["model"]),
        ("model.safetensors", b"\x40\x1f\0\0\0\0\0\0{}", "empty, cut off or damaged", ["model"]),
        ("pytorch_model.bin", b"", "empty, cut off or damaged", ["model"]),
        ("pytorch_model.bin", b"half", "empty, cut off or damaged", ["model"]),
    ],
)
def test_a_flawed_file_is_named(folder, file, content, told, loads):
    if file.endswith(".bin"):
        (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(content)
    for load in loads:
        with pytest.raises(ValueError, match=rf"\({file} .*{told}") as error:
            LOADS[load](str(folder))
        assert "\n" not in str(error.value)


@pytest.fixture
def with_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose configuration and tokenizer need its Python file, which writes the file `ran`."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("standard input is read"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder.parent / "modules"))
    monkeypatch.syspath_prepend(str(folder.parent / "modules"))
    (folder / "code.py").write_text(CODE.format(marker=str(folder.parent / "ran")))
    needed = {"config.json": {"AutoConfig": "code.C"}, "tokenizer_config.json": {"AutoTokenizer": ["code.T", "code.T"]}}
    for name, classes in needed.items():
        content = json.loads((folder / name).read_text())
        content |= {"auto_map": classes, "tokenizer_class": "Own", "model_type": "own"}
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("load", ["tokenizer", "tokenizer_path", "model", "head"])
def test_the_code_of_a_folder_is_not_run(with_code, load):
    how = {"tokenizer": train_tokenizer(["some words"], size=260), "labels": ("a", "b"), "dropout": 0.0, "seed": 0}
    head = {"head": lambda name: build_model(name, "classification", **how)}
    with pytest.raises(ValueError, match=r"--trust_remote_code") as error:
        (LOADS | head)[load](str(with_code))
    assert "\n" not in str(error.value)
    assert not (with_code.parent / "ran").exists()


@pytest.mark.parametrize("setting", ["tokenizer_path", "model_name"])
@pytest.mark.parametrize("trusted", [False, True])
def test_the_flag_of_pretraining_decides(folder, monkeypatch, setting, trusted):
    given, right = [], AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *names, **how: given.append(how) or right(*names))
    tokenizer_for(PretrainConfig(**{setting: str(folder)}, block_size=8, trust_remote_code=trusted))
    assert given == [{"trust_remote_code": trusted}]


def test_weights_that_are_not_finite_are_named(folder):
    model = GPT2LMHeadModel.from_pretrained(folder)
    for value in (torch.nan, torch.inf):
        with torch.no_grad():
            model.transformer.h[0].mlp.c_fc.weight[0, 0] = value
        model.save_pretrained(folder)
        with pytest.raises(ValueError, match=r"NaN or infinity in transformer\.h\.0\.mlp\.c_fc\.weight"):
            load_model(str(folder))


def test_a_quantised_model_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ValueError, match=r"quantised \(.*gptq"):
        load_model(str(folder))


TINY = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}


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


def test_a_folder_that_holds_no_decoder_is_named(tmp_path):
    sizes = {"model_type": "gpt2", **TINY}
    wrong = [{}, [], None, {"model_type": "bert"}, {**sizes, "n_embd": "16"}, {**sizes, "n_head": 0}]
    for content in ("no json", *map(json.dumps, [*wrong, {**sizes, "n_head": 2.0}, {**sizes, "n_layer": True}])):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="holds no decoder") as error:
            check_model(str(tmp_path), 2, 64)
        assert "\n" not in str(error.value)
        assert "config.json" in str(error.value)


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


@pytest.mark.parametrize("load", [load_tokenizer, lambda folder: tokenizer_for(PretrainConfig(tokenizer_path=folder))])
def test_texts_are_neither_cut_nor_padded(tmp_path, load):
    tokenizer, texts = load_tokenizer("gpt2-nano"), ["short", "one two three four five six seven eight nine ten"]
    whole = [ids.tolist() for ids in encode(tokenizer, texts)]
    tokenizer(texts, padding=True, truncation=True, max_length=8)
    assert {len(ids) for ids in encode(tokenizer, texts)} == {9}, "control: it remembers what it did last"
    tokenizer.save_pretrained(tmp_path)
    assert [ids.tolist() for ids in encode(load(str(tmp_path)), texts)] == whole


def test_the_tokens_before_every_text_are_those_that_the_tokenizer_asks_for(tmp_path):
    tokenizer = load_tokenizer("gpt2-nano")
    assert (first_tokens(tokenizer), first_token_names(tokenizer)) == ([], {}), "of the study's own models: none"
    with_bos(tokenizer).save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert first_tokens(loaded) == [loaded.convert_tokens_to_ids(BOS)], "and not the end token, which comes last"
    assert first_token_names(loaded) == {"first_tokens": [BOS]}
