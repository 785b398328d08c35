"""Train a real model over a lossy network, and measure whether it does without its strongest packets.

Three measurements: the model's accuracy over the network with each repair, its accuracy without losses, and how far its
strongest packet stands out among the packets of the same sum (`lossytp.tolerance.strong_packets`).
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lossytp.study.measurements.evaluated_runs import STRONGEST_FILE, evaluate_at, train
from lossytp.study.records import final_accuracies
from lossytp.tolerance.strong_packets import packet_norms, summary
from lossytp.training.config import TrainConfig
from lossytp.training.config.network import NetworkSettings
from lossytp.training.files import write_atomically
from lossytp.training.models import load_model, load_tokenizer
from lossytp.training.record import read_record
from lossytp.training.saved_models import remove_models
from lossytp.training.tasks.data import load_dataset

TEXTS = 16  # of the test split, for the norms of packets


def train_and_measure(
    config: TrainConfig, *, loss_rate: float, repairs: Sequence[str], known: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Train, then evaluate the last model over the network at `loss_rate`, with each of the repairs.

    Runs and measurements that are finished are not repeated. The saved models are large, and are deleted at the end.

    Args:
        config: the run's configuration, which saves its model.
        loss_rate: of the evaluations.
        repairs: of the evaluations.
        known: an earlier table. A finished run that has all its rows there is not measured again: results keep neither
            models nor the files of each measurement.

    Returns:
        A row for each repair: `run`, the name of the run's folder, `task`, `seed`, `trained_at` and `trained_with`, the
        loss rate and the repair of the training; `evaluated_at`, `evaluated_with`, `accuracy`, `clean`, the accuracy
        without losses, and `strongest`, the largest ratio of a sum's strongest packet to its median packet, in packets
        of fp32. A run that diverged has no `strongest`.

    Raises:
        ValueError: if the run saves no model; or if a measurement is missing, and the model was deleted.
    """
    if not config.save_model:
        raise ValueError("save_model = False leaves no model to measure: set it to True")
    folder = Path(config.output_dir)
    finished = read_record(folder)
    if known is not None and finished is not None:  # the run may have been repeated since
        same = (known["run"] == folder.name) & (known["clean"] == final_accuracies(finished)["accuracy_clean"])
        ours = known[same & (known["evaluated_at"] == loss_rate)].set_index("evaluated_with")
        if set(repairs) <= set(ours.index):
            return ours.loc[list(repairs)].reset_index()[list(known)]
    record = train(config)
    strongest = math.nan if record["status"] == "not finite" else _strongest(config)["ratio"]
    rows = [
        {
            "run": folder.name,
            "task": config.dataset,
            "seed": config.seed,
            "trained_at": config.loss_rate,
            "trained_with": config.repair,
            "evaluated_at": loss_rate,
            "evaluated_with": repair,
            "accuracy": evaluate_at(config, loss_rate, repair)["accuracy"],
            "clean": final_accuracies(record)["accuracy_clean"],
            "strongest": strongest,
        }
        for repair in repairs
    ]
    remove_models(folder)
    return pd.DataFrame(rows)


def _strongest(config: TrainConfig) -> dict[str, Any]:
    """Return the sum whose strongest packet stands out most, of the last model on test examples."""
    folder = Path(config.output_dir)
    file, model = folder / STRONGEST_FILE, folder / "last"
    if file.is_file():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    if not model.is_dir():
        raise ValueError(
            f"{folder} has no {STRONGEST_FILE}, and its model was deleted: delete this folder and train again"
        )
    tokenizer, length = load_tokenizer(str(model)), config.max_length
    data = load_dataset(
        config.dataset, tokenizer, max_length=length, train_samples=1, test_samples=TEXTS, task=config.definition()
    )
    batches = [data.test.batch(np.array([number])) for number in range(len(data.test))]
    texts = [batch["input_ids"][0][batch["attention_mask"][0].bool()] for batch in batches]
    settings = NetworkSettings(**config.group(NetworkSettings))
    table = summary(packet_norms(load_model(str(model)).eval(), texts, settings))
    (found,) = json.loads(table.nlargest(1, "ratio").to_json(orient="records"))
    write_atomically(file, json.dumps(found, indent=1) + "\n")
    return dict(found)
