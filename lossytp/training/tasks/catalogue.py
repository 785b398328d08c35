"""List the tasks by name.

To add your own task, add an entry anywhere in your code:

    TASKS["reviews"] = Classification(
        source=Files(train="reviews.csv", test="held_out.csv"), body="{review}", label="stars", labels=("1", "2", "3")
    )

Row numbers are those of the official splits. Tasks are evaluated on the validation split if the hub withholds the test
labels, as for all of GLUE. IMDB is evaluated on test because it has no validation split, and ARC-Easy as in Brown et
al., NeurIPS 2020. Targets are those of earlier studies of time to accuracy.
"""

import re

from lossytp.network.checks import shown
from lossytp.training.tasks import docstrings
from lossytp.training.tasks.held_out import HeldOut
from lossytp.training.tasks.kinds import Classification, Generation, MultipleChoice, Regression, Task
from lossytp.training.tasks.sources import Row, Source


def _glue(name: str, train: int, test: int, validation: str = "validation") -> Source:
    return Source(
        path="nyu-mll/glue",
        name=name,
        splits={"train": "train", "test": validation},
        official_rows={"train": train, "test": test},
    )


def _without_line_breaks(row: Row) -> str:
    return " ".join(row["text"].replace("<br />", " ").split())


def _before_blank(row: Row) -> str:
    return row["sentence"].partition("_")[0]


def _from_blank(row: Row) -> str:
    """Return the option and the words after the blank. The model scores the same words after either option."""
    before, _, after = row["sentence"].partition("_")
    return (" " if before.endswith(" ") else "") + row["option"] + after


def _captioned(row: Row) -> str:
    return f"{row['activity_label']}: {_without_marks(row['ctx'])}"


def _captioned_ending(row: Row) -> str:
    return f" {_without_marks(row['option'])}"


def _without_marks(text: str) -> str:
    """Remove [header], [title] and the like, which HellaSwag's texts from WikiHow contain."""
    return " ".join(re.sub(r"\[.*?\]", " ", text).split())


def _paragraphs(row: Row) -> str:
    """Return all of HotpotQA's paragraphs in order, both the supporting and the distracting ones."""
    paragraphs = zip(row["context"]["title"], row["context"]["sentences"], strict=True)
    return "\n".join(f"{title}: {' '.join(''.join(sentences).split())}" for title, sentences in paragraphs)


SAME_END = " ."  # ends all texts alike, even cut ones and phrases: GPT-2 classifies at the last token


TASKS: dict[str, Task] = {
    "docstrings": Classification(
        source=docstrings.Docstrings(), body="{text}", ending=SAME_END, labels=docstrings.LIBRARIES
    ),
    # GLUE (Wang et al., ICLR 2019)
    "sst2": Classification(
        source=_glue("sst2", 67349, 872),
        body="{sentence}",
        ending=SAME_END,
        labels=("negative", "positive"),
        targets=(0.7, 0.8, 0.9),
    ),
    "sst2_held_out": Classification(  # 5,872 test examples, enough to distinguish arms
        source=HeldOut(source=_glue("sst2", 67349, 872), column="sentence", sentences=5000),
        body="{sentence}",
        ending=SAME_END,
        labels=("negative", "positive"),
    ),
    "cola": Classification(
        source=_glue("cola", 8551, 1043),
        body="{sentence}",
        labels=("unacceptable", "acceptable"),
        metrics=("matthews_correlation", "accuracy"),
    ),
    "mrpc": Classification(
        source=_glue("mrpc", 3668, 408),
        body="{sentence1}",
        ending=" Compare: {sentence2}",
        labels=("not equivalent", "equivalent"),
        metrics=("accuracy", "f1"),
    ),
    "rte": Classification(
        source=_glue("rte", 2490, 277),
        body="{sentence1}",
        ending=" Hypothesis: {sentence2}",
        labels=("entailment", "not entailment"),
    ),
    "qnli": Classification(
        source=_glue("qnli", 104743, 5463),
        body="{sentence}",
        ending=" Question: {question}",
        labels=("entailment", "not entailment"),
    ),
    "mnli": Classification(
        source=_glue("mnli", 392702, 9815, "validation_matched"),
        body="{premise}",
        ending=" Hypothesis: {hypothesis}",
        labels=("entailment", "neutral", "contradiction"),
        targets=(0.6, 0.7, 0.75),
    ),
    "stsb": Regression(
        source=_glue("stsb", 5749, 1500),
        body="{sentence1}",
        ending=" Compare: {sentence2}",
        metrics=("pearson", "spearman"),
    ),
    "imdb": Classification(  # Maas et al., ACL 2011
        source=Source(
            path="stanfordnlp/imdb",
            name="plain_text",
            splits={"train": "train", "test": "test"},
            official_rows={"train": 25000, "test": 25000},
        ),
        body=_without_line_breaks,
        ending=SAME_END,
        labels=("negative", "positive"),
    ),
    "winogrande_l": MultipleChoice(  # Sakaguchi et al., AAAI 2020; the option replaces the blank
        source=Source(path="allenai/winogrande", name="winogrande_l", official_rows={"train": 10234, "test": 1267}),
        body=_before_blank,
        options=("option1", "option2"),
        ending=_from_blank,
        answer=lambda row: row["answer"] and int(row["answer"]) - 1,
        targets=(0.7, 0.8, 0.9),
    ),
    "hellaswag": MultipleChoice(  # Zellers et al., ACL 2019
        source=Source(path="Rowan/hellaswag", official_rows={"train": 39905, "test": 10042}),
        body=_captioned,
        options="endings",
        ending=_captioned_ending,
        targets=(0.3, 0.5, 0.7),
    ),
    "piqa": MultipleChoice(  # Bisk et al., AAAI 2020
        source=Source(path="ybisk/piqa", name="plain_text", official_rows={"train": 16113, "test": 1838}),
        body="Question: {goal}",
        options=("sol1", "sol2"),
        ending=" Answer: {option}",
        targets=(0.5, 0.7, 0.8),
    ),
    "arc_easy": MultipleChoice(  # Clark et al., 2018; three to five options, named A, B, ... or 1, 2, ...
        source=Source(
            path="allenai/ai2_arc",
            name="ARC-Easy",
            splits={"train": "train", "test": "test"},
            official_rows={"train": 2251, "test": 2376},
        ),
        body="Question: {question}",
        options=lambda row: row["choices"]["text"],
        ending=" Answer: {option}",
        answer=lambda row: row["answerKey"] and row["choices"]["label"].index(row["answerKey"]),
        targets=(0.4, 0.6, 0.7),
    ),
    "quality": MultipleChoice(  # Pang et al., NAACL 2022; the model reads the end of a long article, then the question
        source=Source(path="emozilla/quality", official_rows={"train": 2523, "test": 2086}),
        body="{article}",
        options="options",
        ending=" Question: {question} Answer: {option}",
        answer="answer",
        targets=(0.3, 0.5, 0.7),
    ),
    "cosmosqa": MultipleChoice(  # Huang et al., EMNLP 2019
        source=Source(path="allenai/cosmos_qa", official_rows={"train": 25262, "test": 2985}),
        body="{context}",
        options=("answer0", "answer1", "answer2", "answer3"),
        ending=" Question: {question} Answer: {option}",
    ),
    "squad": Generation(  # Rajpurkar et al., EMNLP 2016
        source=Source(path="rajpurkar/squad", name="plain_text", official_rows={"train": 87599, "test": 10570}),
        body="{context}",
        ending=" Question: {question} Answer:",
        answers=lambda row: row["answers"]["text"],
        metrics=("exact_match", "f1"),
        targets=(0.4, 0.6, 0.8),
    ),
    "hotpotqa": Generation(  # Yang et al., EMNLP 2018; two of the ten paragraphs hold the answer
        source=Source(path="hotpotqa/hotpot_qa", name="distractor", official_rows={"train": 90447, "test": 7405}),
        body=_paragraphs,
        ending=" Question: {question} Answer:",
        answers="answer",
        metrics=("exact_match", "f1"),
        targets=(0.1, 0.3, 0.5),
    ),
}


def task_named(name: str) -> Task:
    """Return the task of this name.

    Raises:
        ValueError: if there is none.
    """
    if name not in TASKS:
        raise ValueError(
            f"dataset = {shown(name)} is unknown: choose one of {', '.join(TASKS)}, or give a YAML file that "
            "declares a task of your own"
        )
    return TASKS[name]
