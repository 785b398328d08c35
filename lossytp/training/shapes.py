"""Define the models that have a name, and check the shape of any model against the flags.

A name with the suffix `-scratch` gives the model's shape and tokenizer with random weights.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lossytp.network.checks import check_at_least, shown
from lossytp.parallel.group import check_divides
from lossytp.training.files import first_line
from lossytp.training.gguf import SUFFIX, gguf_file
from lossytp.training.model_files import flaw

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
LLAMAS: dict[str, dict[str, Any]] = {  # gated: gate, up and down projections
    "llama-nano": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 344,
        "vocab_size": 4096,
        "max_position_embeddings": 128,
    },
    "llama-124m": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "intermediate_size": 2048,
        "vocab_size": 50257,
        "max_position_embeddings": 4096,
    },
}
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
        gguf_file(base)
        return None
    if base.count("/") == 1 and not base.startswith((".", "/")):
        return next((HUB_SHAPES[known] for known, path in HUB.items() if path == base), None)
    if "/" in base:
        raise ValueError(f"model_name = {shown(base)} does not exist: give a folder with a config.json, or owner/name")
    known = ", ".join((*PRESETS, *LLAMAS, *HUB, "a folder", "a .gguf file", "owner/name on the hub"))
    raise ValueError(f"model_name = {shown(base)} is unknown: choose one of {known}")


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


def _shape_in(folder: Path) -> Shape:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise ValueError(f"{str(config)[:60]} has no model_type")
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
