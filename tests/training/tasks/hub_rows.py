"""Provide a few hand-made rows of each data set of the hub, in its schema, and a folder laid out like the hub."""

from pathlib import Path
from typing import Any

import pandas as pd

from lossytp.training.tasks import TASKS, Source


def _pair(first, second, labels):
    return [
        {first: f"The boat of number {i} sails .", second: f"Does boat {i} sail ?", "label": label, "idx": i}
        for i, label in enumerate(labels)
    ]


def _single(column, labels):
    return [{column: f"a story told {i} times ", "label": label, "idx": i} for i, label in enumerate(labels)]


WINOGRANDE = [
    {
        "sentence": "Sarah was a better surgeon than Maria so _ got the harder cases.",
        "option1": "Sarah",
        "option2": "Maria",
        "answer": "1",
    },
    {"sentence": "Ian ate Dennis's menudo because _ enjoyed it.", "option1": "Dennis", "option2": "Ian", "answer": "2"},
    {
        "sentence": "_'s cup did not fit the shelf, for the cup was big.",
        "option1": "Ann",
        "option2": "Eve",
        "answer": "2",
    },
]
HELLASWAG = [
    {
        "ind": i,
        "activity_label": "Cutting bread",
        "ctx_a": "A cook takes a knife.",
        "ctx_b": "she",
        "ctx": "[header] How to cut [title] A cook takes a knife. she",
        "endings": [f"{verb} the bread {i}. [step] Done." for verb in ("cuts", "sings", "paints", "reads")],
        "source_id": f"wikihow~{i}",
        "split": "val",
        "split_type": "indomain",
        "label": label,
    }
    for i, label in enumerate("0312")
]
PIQA = [
    {"goal": f"open jar {i}", "sol1": f"twist the lid {i}", "sol2": f"kick the wall {i}", "label": label}
    for i, label in enumerate((0, 1, 1))
]
ARC = [
    {
        "id": "a",
        "question": "Which is a gas?",
        "choices": {"text": ["iron", "oxygen", "quartz"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    },
    {
        "id": "b",
        "question": "What melts?",
        "choices": {"text": ["ice", "fire", "wind", "sound"], "label": ["1", "2", "3", "4"]},
        "answerKey": "1",
    },
    {
        "id": "c",
        "question": "What flies?",
        "choices": {"text": ["a rock", "a root", "a log", "a pond", "a wren"], "label": list("ABCDE")},
        "answerKey": "E",
    },
]
QUALITY = [
    {
        "article": "Long ago a ship left Mars.\n\n    It never came back.",
        "question": f"What left in year {i}?",
        "options": ["A ship", "A dog", "A song", "A star"],
        "answer": label,
        "hard": bool(i % 2),
    }
    for i, label in enumerate((0, 2, 2, 3))
]
COSMOS = [
    {
        "id": f"q{i}",
        "context": "I ran home and it rained .",
        "question": "Why did I run ?",
        "answer0": "It rained .",
        "answer1": "None of the above choices .",
        "answer2": f"I like {i} cats .",
        "answer3": "The bus came .",
        "label": label,
    }
    for i, label in enumerate((0, 1, 3))
]
SQUAD = [
    {
        "id": "s0",
        "title": "Rivers",
        "context": "The Nile flows north through Egypt to the sea.",
        "question": "Through which land does it flow?",
        "answers": {"text": ["Egypt", "Egypt", "through Egypt"], "answer_start": [29, 29, 21]},
    },
    {
        "id": "s1",
        "title": "Rivers",
        "context": "The Rhine is 1,230 km long.",
        "question": "How long is it?",
        "answers": {"text": ["1,230 km"], "answer_start": [13]},
    },
]
HOTPOT = [
    {
        "id": "h0",
        "question": "In which land was the founder of Acme born?",
        "answer": "Norway",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": ["Acme", "Jo Moe"], "sent_id": [0, 1]},
        "context": {
            "title": ["Acme", "Paris", "Jo Moe"],
            "sentences": [
                ["Jo Moe founded Acme."],
                ["Paris is old.", " It is big."],
                ["Jo is a man.", " He is from Norway."],
            ],
        },
    },
    {
        "id": "h1",
        "question": "Are both rivers?",
        "answer": "yes",
        "type": "comparison",
        "level": "easy",
        "supporting_facts": {"title": ["Oder"], "sent_id": [0]},
        "context": {"title": ["Oder", "Elbe"], "sentences": [["The Oder is a river."], ["The Elbe is one, too."]]},
    },
]

ROWS: dict[str, list[dict[str, Any]]] = {
    "sst2": _single("sentence", (0, 1, 1, 1, 0)),
    "cola": _single("sentence", (1, 1, 0, 1)),
    "mrpc": _pair("sentence1", "sentence2", (1, 0, 1, 1)),
    "rte": _pair("sentence1", "sentence2", (1, 0, 1)),
    "qnli": _pair("sentence", "question", (0, 0, 1)),
    "mnli": _pair("premise", "hypothesis", (2, 1, 0, 1)),
    "stsb": _pair("sentence1", "sentence2", (0.0, 5.0, 2.6, 3.25)),
    "imdb": [{"text": f"Not bad.<br /><br />I saw it {i} times.", "label": i % 2} for i in range(5)],
    "winogrande_l": WINOGRANDE,
    "hellaswag": HELLASWAG,
    "piqa": PIQA,
    "arc_easy": ARC,
    "quality": QUALITY,
    "cosmosqa": COSMOS,
    "squad": SQUAD,
    "hotpotqa": HOTPOT,
}


def write_hub(folder: Path) -> None:
    """Write all rows below `folder`, each split to a parquet file with the hub's name."""
    for name, rows in ROWS.items():
        source = TASKS[name].source
        assert isinstance(source, Source)
        place = folder / source.path / (source.name or "data")
        place.mkdir(parents=True)
        for split in source.splits.values():
            pd.DataFrame(rows).to_parquet(place / f"{split}-00000-of-00001.parquet")
