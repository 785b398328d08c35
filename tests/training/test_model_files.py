"""Test what is said of folders whose files are not what their names say, and that their code is not run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from lossytp.training.config import PretrainConfig
from lossytp.training.models import build_model, load_model, load_tokenizer
from lossytp.training.shapes import check_model, flaw
from lossytp.training.text import tokenizer_for, train_tokenizer

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
def test_a_flawed_file_is_named(folder: Path, file: str, content: bytes, told: str, loads: list[str]) -> None:
    if file.endswith(".bin"):
        (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(content)
    for load in loads:
        with pytest.raises(ValueError, match=rf"\({file} .*{told}") as error:
            LOADS[load](str(folder))
        assert "\n" not in str(error.value)


def test_a_flawed_file_beside_it_does_not_hide_the_error(folder: Path) -> None:
    (folder / "stray.bin").write_bytes(b"")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"\(stray\.bin is empty.*; .*config\.json.* JSON"):
        load_model(str(folder))


def test_whole_files_have_no_flaw(folder: Path) -> None:
    assert [flaw(file) for file in folder.iterdir() if flaw(file)] == []


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
def test_the_code_of_a_folder_is_not_run(with_code: Path, load: str) -> None:
    how = {"tokenizer": train_tokenizer(["some words"], size=260), "labels": ("a", "b"), "dropout": 0.0, "seed": 0}
    head = {"head": lambda name: build_model(name, "classification", **how)}
    with pytest.raises(ValueError, match=r"--trust_remote_code") as error:
        (LOADS | head)[load](str(with_code))
    assert "\n" not in str(error.value)
    assert not (with_code.parent / "ran").exists()


@pytest.mark.parametrize("setting", ["tokenizer_path", "model_name"])
@pytest.mark.parametrize("trusted", [False, True])
def test_the_flag_of_pretraining_decides(
    folder: Path, monkeypatch: pytest.MonkeyPatch, setting: str, trusted: bool
) -> None:
    given, right = [], AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *names, **how: given.append(how) or right(*names))
    tokenizer_for(PretrainConfig(**{setting: str(folder)}, block_size=8, trust_remote_code=trusted))
    assert given == [{"trust_remote_code": trusted}]


def test_weights_that_are_not_finite_are_named(folder: Path) -> None:
    model = GPT2LMHeadModel.from_pretrained(folder)
    for value in (torch.nan, torch.inf):
        with torch.no_grad():
            model.transformer.h[0].mlp.c_fc.weight[0, 0] = value
        model.save_pretrained(folder)
        with pytest.raises(ValueError, match=r"NaN or infinity in transformer\.h\.0\.mlp\.c_fc\.weight"):
            load_model(str(folder))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module."])
def test_the_weights_of_a_wrapper_are_told_apart_from_missing_ones(folder: Path, prefix: str) -> None:
    model = GPT2LMHeadModel.from_pretrained(folder)
    model.save_pretrained(folder, state_dict={prefix + name: weight for name, weight in model.state_dict().items()})
    with pytest.raises(ValueError, match=rf"without the wrapper of {prefix}transformer"):
        load_model(str(folder))


def test_a_quantised_model_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ValueError, match=r"quantised \(.*gptq"):
        load_model(str(folder))
