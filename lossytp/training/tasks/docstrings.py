"""The embedded classification task: which library is a docstring from?

The text is what pip has already put on the machine, so nothing is downloaded: the docstrings of functions and
classes of nine pinned libraries, their names masked. Whole modules go to training or to test, and a text
found in two places is dropped from all but one, so that inherited docstrings do not leak across the split.
"""

import ast
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from lossytp.training.tasks.cache import cached, code_digest
from lossytp.training.tasks.sources import Split

if TYPE_CHECKING:
    from datasets import Dataset

LIBRARIES = ("matplotlib", "networkx", "numpy", "pandas", "scipy", "sqlalchemy", "sympy", "torch", "transformers")
ALIASES = ("mpl", "plt", "nx", "np", "pd", "sp", "sa", "pytorch", "hf", "huggingface", "hugging face")
MASK = "lib"
SHORTEST_CHARACTERS = 100  # shorter ones seldom tell
LONGEST_CHARACTERS = 2000  # more than any model here reads
TEST_PERCENT = 15

_NAMES = re.compile(
    r"(?<![a-z])(" + "|".join(sorted((*LIBRARIES, *ALIASES), key=len, reverse=True)) + r")(?![a-z])", re.IGNORECASE
)


@dataclass(frozen=True)
class Docstrings:
    """The source of the embedded task: rows of text and label, the index into LIBRARIES."""

    def __str__(self) -> str:
        return "docstrings"

    def rows(self, split: Split) -> "Dataset":
        """All rows of the split, read from the libraries once and then from the cache."""
        import datasets

        folder = cached("docstrings-text", version(), _write)
        return datasets.Dataset.from_dict(json.loads((folder / f"{split}.json").read_text(encoding="utf-8")))

    def subset(self, split: Split) -> None:
        """There is no official number."""
        return

    def fingerprint(self, split: Split) -> str:
        """What the text depends on."""
        return version()


def mask_names(text: str) -> str:
    """`text` with every library's name and usual alias replaced by "lib"."""
    return _NAMES.sub(MASK, text)


def split_of(module: str) -> str:
    """ "test" for a fixed pseudo-random share of all modules, else "train"."""
    number = int.from_bytes(hashlib.blake2b(module.encode(), digest_size=4).digest(), "big")
    return "test" if number % 100 < TEST_PERCENT else "train"


def definitions(statements: Iterable[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The functions and classes defined by these statements, methods and inner classes included."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
        elif isinstance(statement, ast.ClassDef):
            yield statement
            yield from definitions(statement.body)


def docstrings_of(source: str) -> list[str]:
    """Docstrings of the functions and classes of a Python source, white space folded, in source order."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # some libraries ship templates and tests of broken code under .py
        return []
    found = (ast.get_docstring(definition, clean=False) or "" for definition in definitions(tree.body))
    texts = (" ".join(docstring.split())[:LONGEST_CHARACTERS] for docstring in found)
    return [text for text in texts if len(text) >= SHORTEST_CHARACTERS]


def _docstrings_of_files(files: list[Path]) -> list[list[str]]:
    gc.disable()  # syntax trees are large and short-lived; this runs in a process of its own
    sources = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    return [docstrings_of(source) if '"""' in source else [] for source in sources]


def load_docstrings() -> dict[str, list[tuple[str, int]]]:
    """{"train": [...], "test": [...]} of (masked text, label), in an order that depends on the libraries alone."""
    files = [
        (label, root, file) for label, root in enumerate(map(_root, LIBRARIES)) for file in sorted(root.rglob("*.py"))
    ]
    batches = [[file for _, _, file in files[start : start + 100]] for start in range(0, len(files), 100)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        texts = [texts for batch in pool.map(_docstrings_of_files, batches) for texts in batch]
    splits: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    seen: set[str] = set()
    for (label, root, file), file_texts in zip(files, texts, strict=True):
        split = split_of(f"{LIBRARIES[label]}/{file.relative_to(root).as_posix()}")
        for text in map(mask_names, file_texts):
            if text not in seen:
                seen.add(text)
                splits[split].append((text, label))
    return splits


def version() -> str:
    """What the text depends on: the libraries' versions, Python's (its parser), and this file."""
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
        raise ModuleNotFoundError(
            f"the docstrings task reads {library}, which is not installed: run ./run_all.sh setup"
        )
    return Path(spec.submodule_search_locations[0])
