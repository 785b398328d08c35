"""Provide a few hand-made rows of each data set of the hub, and a folder laid out like the hub."""

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


def _rows(columns, *rows):
    return [dict(zip(columns.split(), row, strict=True)) for row in rows]


WINOGRANDE = _rows(
    "sentence option1 option2 answer",
    ("Sarah was a better surgeon than Maria so _ got the harder cases.", "Sarah", "Maria", "1"),
    ("Ian ate Dennis's menudo because _ enjoyed it.", "Dennis", "Ian", "2"),
    ("_'s cup did not fit the shelf, for the cup was big.", "Ann", "Eve", "2"),
)
CUTTING = "Cutting bread", "[header] How to cut [title] A cook takes a knife. she"
ENDINGS = [f"{verb} the bread {{}}. [step] Done." for verb in ("cuts", "sings", "paints", "reads")]
HELLASWAG = _rows(
    "activity_label ctx endings label",
    *((*CUTTING, [ending.format(i) for ending in ENDINGS], label) for i, label in enumerate("0312")),
)
PIQA = _rows(
    "goal sol1 sol2 label",
    *((f"open jar {i}", f"twist the lid {i}", f"kick the wall {i}", label) for i, label in enumerate((0, 1, 1))),
)
ARC = _rows(
    "question choices answerKey",
    ("Which is a gas?", {"text": ["iron", "oxygen", "quartz"], "label": ["A", "B", "C"]}, "B"),
    ("What melts?", {"text": ["ice", "fire", "wind", "sound"], "label": ["1", "2", "3", "4"]}, "1"),
    ("What flies?", {"text": ["a rock", "a root", "a log", "a pond", "a wren"], "label": list("ABCDE")}, "E"),
)
ARTICLE, NAMES = "Long ago a ship left Mars.\n\n    It never came back.", ["A ship", "A dog", "A song", "A star"]
QUALITY = _rows(
    "article question options answer hard",
    *((ARTICLE, f"What left in year {i}?", NAMES, label, bool(i % 2)) for i, label in enumerate((0, 2, 2, 3))),
)
WET, NONE = ("I ran home and it rained .", "Why did I run ?", "It rained ."), "None of the above choices ."
COSMOS = _rows(
    "context question answer0 answer1 answer2 answer3 label",
    *((*WET, NONE, f"I like {i} cats .", "The bus came .", label) for i, label in enumerate((0, 1, 3))),
)
NILE = {"text": ["Egypt", "Egypt", "through Egypt"], "answer_start": [29, 29, 21]}
RHINE = {"text": ["1,230 km"], "answer_start": [13]}
SQUAD = _rows(
    "title context question answers",
    ("Rivers", "The Nile flows north through Egypt to the sea.", "Through which land does it flow?", NILE),
    ("Rivers", "The Rhine is 1,230 km long.", "How long is it?", RHINE),
)
ABOUT = [["Jo Moe founded Acme."], ["Paris is old.", " It is big."], ["Jo is a man.", " He is from Norway."]]
ACME = {"title": ["Acme", "Paris", "Jo Moe"], "sentences": ABOUT}
FACTS = {"title": ["Acme", "Jo Moe"], "sent_id": [0, 1]}
ODER = {"title": ["Oder", "Elbe"], "sentences": [["The Oder is a river."], ["The Elbe is one, too."]]}
HOTPOT = _rows(
    "question answer type level supporting_facts context",
    ("In which land was the founder of Acme born?", "Norway", "bridge", "hard", FACTS, ACME),
    ("Are both rivers?", "yes", "comparison", "easy", {"title": ["Oder"], "sent_id": [0]}, ODER),
)

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
    for name, rows in ROWS.items():
        source = TASKS[name].source
        assert isinstance(source, Source)
        place = folder / source.path / (source.name or "data")
        place.mkdir(parents=True)
        for split in source.splits.values():
            pd.DataFrame(rows).to_parquet(place / f"{split}-00000-of-00001.parquet")
