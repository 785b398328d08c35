"""Say what is wrong with a model's files, in place of the errors of transformers' readers."""

import codecs
import os
from pathlib import Path

from lossytp.training.files import first_line

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
    told = [what for first, what in STARTS.items() if start.startswith(first)]
    return f"{file.name} {(told or ['is empty, cut off or damaged'])[0]}" if told or damaged else None
