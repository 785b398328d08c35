"""The embedded classification task: which library is a docstring from?

The task downloads nothing. Its texts are the docstrings of functions and classes in nine pinned libraries that pip has
already installed, with the libraries' names masked. Each module belongs to one split as a whole. A text found in
several places is kept once, so that inherited docstrings do not leak from one split to the other.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lossytp.training.rows import RowSource, Split, cached, code_digest

if TYPE_CHECKING:
    from datasets import Dataset

LIBRARIES = ("matplotlib", "networkx", "numpy", "pandas", "scipy", "sqlalchemy", "sympy", "torch", "transformers")
ALIASES = ("mpl", "plt", "nx", "np", "pd", "sp", "sa", "pytorch", "hf", "huggingface", "hugging face")
MASK = "lib"
SHORTEST_CHARACTERS = 100  # shorter texts seldom reveal their library
LONGEST_CHARACTERS = 2000  # more than any model here reads
TEST_PERCENT = 15

_NAMES = re.compile(
    r"(?<![a-z])(" + "|".join(sorted((*LIBRARIES, *ALIASES), key=len, reverse=True)) + r")(?![a-z])", re.IGNORECASE
)


@dataclass(frozen=True)
class Docstrings(RowSource):
    """The source of the embedded task. A row has a text and a label, which is an index into LIBRARIES."""

    def __str__(self) -> str:
        return "docstrings"

    def rows(self, split: Split) -> "Dataset":
        import datasets

        folder = cached("docstrings-text", version(), _write)
        return datasets.Dataset.from_dict(json.loads((folder / f"{split}.json").read_text(encoding="utf-8")))

    def fingerprint(self, split: Split) -> str:
        return version()


def mask_names(text: str) -> str:
    """Replace every library's name and usual aliases with "lib"."""
    return _NAMES.sub(MASK, text)


def split_of(module: str) -> str:
    """Return "test" for a fixed pseudo-random share of all modules, else "train"."""
    number = int.from_bytes(hashlib.blake2b(module.encode(), digest_size=4).digest(), "big")
    return "test" if number % 100 < TEST_PERCENT else "train"


def definitions(statements: Iterable[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield the functions and classes that these statements define, including methods and inner classes."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
        elif isinstance(statement, ast.ClassDef):
            yield statement
            yield from definitions(statement.body)


def docstrings_of(source: str) -> list[str]:
    """Return the docstrings of the functions and classes of a Python source, in order, with white space folded."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # some libraries have .py files that are templates, or test broken code
        return []
    found = (ast.get_docstring(definition, clean=False) or "" for definition in definitions(tree.body))
    texts = (" ".join(docstring.split())[:LONGEST_CHARACTERS] for docstring in found)
    return [text for text in texts if len(text) >= SHORTEST_CHARACTERS]


def load_docstrings() -> dict[str, list[tuple[str, int]]]:
    """Return {"train": [...], "test": [...]} of (masked text, label). The order depends only on the libraries."""
    splits: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    seen: set[str] = set()
    for label, library in enumerate(LIBRARIES):
        root = _root(library)
        for file in sorted(root.rglob("*.py")):
            split = split_of(f"{library}/{file.relative_to(root).as_posix()}")
            source = file.read_text(encoding="utf-8", errors="replace")
            for text in map(mask_names, docstrings_of(source) if '"""' in source else []):
                if text not in seen:
                    seen.add(text)
                    splits[split].append((text, label))
    return splits


def version() -> str:
    """Return the versions that the texts depend on: those of the libraries, Python's parser and this file."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES]
    return " ".join([f"python {sys.version_info.major}.{sys.version_info.minor}", *versions, code_digest(__name__)])


def _write(folder: Path) -> None:
    for split, examples in load_docstrings().items():
        texts, labels = zip(*examples, strict=True)
        content = json.dumps({"text": texts, "label": labels})
        (folder / f"{split}.json").write_text(content, encoding="utf-8")


def _root(library: str) -> Path:
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the docstrings task reads {library}: run ./run_all.sh setup, which installs it")
    return Path(spec.submodule_search_locations[0])
