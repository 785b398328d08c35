"""Tasks of one's own of each kind, declared in YAML files beside their rows."""

from pathlib import Path

import pandas as pd
import yaml

from tests.training.tasks_of_all_kinds import rows

DECLARED = {
    "classification": {"body": "{text}", "label": "name", "labels": ["red", "green", "blue"]},
    "regression": {"body": "{text}", "label": "number", "metrics": ["pearson", "spearman"]},
    "multiple choice": {"body": "{text}", "options": ["first", "second"], "answer": "right"},
    "generation": {"body": "{text}", "ending": " Which?", "answers": "name", "metric": "f1"},
}
HEADLINES = {"classification": "accuracy", "regression": "pearson", "multiple choice": "accuracy", "generation": "f1"}


def flat_rows(number, first):
    return [
        {
            "text": row["text"],
            "name": row["colour"][0],
            "number": row["number"],
            "first": ("no", "yes")[row["label"] % 2],
            "second": ("yes", "no")[row["label"] % 2],
            "right": 1 - row["label"] % 2,
        }
        for row in rows(number, first)
    ]


def write_rows(file: Path, rows) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(rows)
    if file.suffix == ".parquet":
        frame.to_parquet(file)
    elif file.suffix == ".csv":
        frame.to_csv(file, index=False)
    else:
        frame.to_json(file, orient="records", lines=file.suffix == ".jsonl")
    return file


def declare(folder: Path, of="classification", *, suffix=".csv", stem="mine", **values) -> Path:
    """Write two training files, a test file, and the YAML file that declares the task; return its path.

    A value of None leaves a key out.
    """
    for number in (0, 1):
        write_rows(folder / f"rows/train-{number}{suffix}", flat_rows(18, 18 * number))
    write_rows(folder / f"rows/test{suffix}", flat_rows(15, 100))
    told = {"train": f"rows/train-*{suffix}", "test": f"rows/test{suffix}", "kind": of, **DECLARED[of], **values}
    file = folder / f"{stem}.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in told.items() if value is not None}))
    return file
