"""Train small models on a task of each kind, and evaluate them."""

import os
from unittest.mock import patch

from lossytp.training import evaluation, models, tasks
from lossytp.training.config import EvaluateConfig, TrainConfig
from lossytp.training.loop import run

SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 4096, "n_positions": 128}
COLOURS = ("red", "green", "blue")
THINGS = ("sky", "grass", "rose", "sea")


def rows(number, first):
    """Yield rows of texts with a colour, which is the class and the answer, and determines the number.

    The right one of two or three options is "yes".
    """
    for i in range(first, first + number):
        options = ["no", "never"][: 1 + i % 2]
        options.insert(i // 3 % (len(options) + 1), "yes")
        yield {
            "text": f"the {THINGS[i % 4]} {i} is {COLOURS[i % 3]}",
            "label": i % 3,
            "number": 1.5 * (i % 3),
            "options": options,
            "right": options.index("yes"),
            "colour": [COLOURS[i % 3]],
        }


TABLE = tasks.Table(train=list(rows(36, 0)), test=list(rows(15, 100)))
TASKS = {
    "classification": tasks.Classification(source=TABLE, body="{text}", labels=COLOURS),
    "regression": tasks.Regression(source=TABLE, body="{text}", label="number", metrics=("pearson", "spearman")),
    "choice": tasks.MultipleChoice(source=TABLE, body="{text}", options="options", answer="right"),
    "generation": tasks.Generation(
        source=TABLE, body="{text}", ending=" Which?", answers="colour", metrics=("exact_match", "f1")
    ),
}
OWN_STREAMS = {"reliable_gather": False}


def settings(folder, kind, **values):
    defaults = {"batch_size": 12, "max_steps": 4, "max_length": 48, "eval_samples": 6, "loss_rate": 0.1, "seed": 0}
    defaults |= {"model_name": "gpt2-nano-scratch", "dataset": kind, "learning_rate": 3e-3, "save_model": True}
    return TrainConfig(**{**defaults, "output_dir": str(folder / "run"), **values})


def at(folder):
    return (
        patch.dict(tasks.TASKS, TASKS),
        patch.dict(models.PRESETS, {"gpt2-nano": SMALL}),
        patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")),
    )


def train(folder, kind, **values):
    one, two, three = at(folder)
    with one, two, three:
        return run(settings(folder, kind, **values))


def evaluate(folder, **values):
    one, two, three = at(folder)
    with one, two, three:
        defaults = {"model_name": str(folder / "run" / "last"), "output_dir": str(folder / "evaluated")}
        return evaluation.run(EvaluateConfig(**{**defaults, "eval_samples": 6, "seed": 0, **values}))


def losses(record):
    return [point["loss"] for point in record["curves"]["train_loss"]]
