"""Suggest a declaration for a file of rows: which column is the label, and which are texts."""

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
    """Return a message that shows what a declaration of this file may look like, on several lines.

    Raises:
        ValueError: if the file cannot be read.
    """
    rows = Files(train=file, test=file).rows("train")
    declaration = {"train": file.name, "test": f"test{file.suffix}", **_of_columns(rows)}
    target = file.with_suffix(".yaml")
    return (
        f"dataset = {str(file)!r} holds rows, but not what to make of them: write a file such as {target}, and give "
        f"--dataset {target}. It may hold, once test names a file of rows that training does not see:\n"
        + yaml.safe_dump(declaration, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10**6).strip()
    )


def _of_columns(rows: "Dataset") -> dict[str, Any]:
    """Return the keys of a declaration that follow from the columns."""
    types = {name: str(getattr(feature, "dtype", "")) for name, feature in rows.features.items()}
    texts = [name for name, kind in types.items() if kind.endswith("string")]  # string, or a parquet's large_string
    few = {name: values for name in rows.column_names if 2 <= len(values := _values(rows, name)) <= MOST_CLASSES}
    numbers = [name for name, kind in types.items() if kind.startswith(NUMBERS)]
    likely = [name for name in LIKELY_LABELS if name in few or name in numbers]
    label = (likely or sorted(few, key=lambda name: len(few[name])) or numbers or ["label"])[0]
    others = [name for name in rows.column_names if name != label]
    parts = [f"{{{name}}}" for name in others if name in texts] or [f"{{{name}!s}}" for name in others]
    told: dict[str, Any] = {"body": " ".join(parts), "label": label}
    if label in few:
        return {"kind": Classification.kind, **told, "labels": few[label]}
    return {"kind": Regression.kind, **told}


def _values(rows: "Dataset", column: str) -> list[str]:
    """Return the names of a column's distinct values in the first rows; none if it holds lists or mappings."""
    values = rows.select(range(min(ROWS_READ, len(rows))))[column]
    if any(isinstance(value, list | dict) for value in values):
        return []
    return sorted({name_of(value) for value in values if value is not None and value != ""})
