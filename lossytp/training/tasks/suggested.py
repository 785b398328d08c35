"""Suggest a declaration for a file of rows, by guessing which column is the label and which are texts."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lossytp.training.tasks.kinds import Classification, Regression
from lossytp.training.tasks.labels import name_of
from lossytp.training.tasks.sources import Files

if TYPE_CHECKING:
    from datasets import Dataset

MOST_CLASSES = 20
NUMBERS = ("int", "uint", "float")
ROWS_READ = 10_000
LIKELY_LABELS = ("label", "labels", "class", "category", "target", "verdict", "sentiment", "stars", "rating", "score")


def suggestion(file: Path) -> str:
    """Return a message of several lines that suggests a declaration of this file.

    Raises:
        ValueError: if the file cannot be read.
    """
    rows = Files(train=file, test=file).rows("train")
    declaration = {"train": file.name, "test": f"test{file.suffix}", **_of_columns(rows)}
    if "labels" in declaration:  # as the file writes them: 01 is not 1
        label = declaration["label"]
        declaration["labels"] = _values(Files(train=file, test=file, texts=(label,)).rows("train"), label)
    target = file.with_suffix(".yaml")
    return (
        f"dataset = {str(file)!r} holds rows, but does not declare a task: write {target} and give --dataset {target}. "
        "These lines would do, once test names a file of rows that training does not see:\n"
        + yaml.safe_dump(declaration, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10**6).strip()
    )


def _of_columns(rows: "Dataset") -> dict[str, Any]:
    """Return the part of a declaration that follows from the columns."""
    types = {name: str(getattr(feature, "dtype", "")) for name, feature in rows.features.items()}
    texts = [name for name, kind in types.items() if kind.endswith("string")]  # string, or a parquet's large_string
    few = {name: values for name in rows.column_names if 2 <= len(values := _values(rows, name)) <= MOST_CLASSES}
    numbers = [name for name, kind in types.items() if kind.startswith(NUMBERS)]
    likely = [name for name in LIKELY_LABELS if name in few or name in numbers]
    label = (likely or sorted(few, key=lambda name: len(few[name])) or numbers or ["label"])[0]
    others = [name for name in rows.column_names if name != label]
    parts = [f"{{{name}}}" for name in others if name in texts] or [f"{{{name}!s}}" for name in others]
    found: dict[str, Any] = {"body": " ".join(parts), "label": label}
    if label in few:
        return {"kind": Classification.kind, **found, "labels": few[label]}
    return {"kind": Regression.kind, **found}


def _values(rows: "Dataset", column: str) -> list[str]:
    """Return a column's distinct values in the first rows as names; none if the column holds lists or mappings."""
    values = rows.select(range(min(ROWS_READ, len(rows))))[column]
    if any(isinstance(value, list | dict) for value in values):
        return []
    return sorted({name_of(value) for value in values if value is not None and value != ""})
