"""Trained at one loss rate, evaluated at others: does training under loss make a model robust to it?"""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from lossytp.network.checks import check_probability
from lossytp.study.checks import check_filled
from lossytp.study.contrasts import contrasts
from lossytp.training.config import TrainConfig
from lossytp.training.evaluate_config import EvaluateConfig
from lossytp.training.network_config import NetworkConfig
from lossytp.training.record import read_record

EVALUATED = "evaluated_at_"  # the loss rate follows: folders of evaluations, in the run's own
MODELS = ("best", "last")
KEY = ["task", "trained_at", "evaluated_at", "seed"]


def train_and_evaluate(config: TrainConfig, evaluated_at: Sequence[float]) -> pd.DataFrame:
    """Train as `config` says, then evaluate its last model over the same network at each of these loss rates.

    One row a rate: `task`, `trained_at`, `evaluated_at`, `seed`, `accuracy` and `cross_entropy` (nats an example) over
    the lossy network, and the `packets` sent and `lost` in that evaluation. At one rate all that are trained with one
    seed lose the same packets, from a stream of that seed which is not the one of the run's own evaluation: without
    losses accuracy is the record's `accuracy_clean`, at the rate of training another sample of its `accuracy_lossy`. A
    run that became not finite left no model: as in `records.tidy` it answers with the most frequent class.

    What is done is not done again. The saved models are deleted once every evaluation is there; they are large.

    Raises:
        ValueError: where `config` saves no model or loses packets in backward alone, where there is no rate or one is
            not in [0, 1], and where an evaluation is missing whose model was deleted: trained again on another machine,
            its last digits would not be those of the evaluations that are there.
    """
    from lossytp.training.loop import run  # torch takes seconds to import, and who reads tables does not need it

    check_filled("evaluated_at", evaluated_at)
    for rate in evaluated_at:
        check_probability("evaluated_at", rate)
    rates = sorted({float(rate) for rate in evaluated_at})
    if not config.save_model:
        raise ValueError("save_model = False leaves no model to evaluate: set it to True")
    if config.lossy_direction == "backward":
        raise ValueError("lossy_direction = 'backward' loses nothing in evaluation: leave it out")
    folder = Path(config.output_dir)
    if read_record(folder) is None:  # then evaluations that lie there are of another run
        for stale in folder.glob(f"{EVALUATED}*"):
            shutil.rmtree(stale)
    record = run(config)
    key = {"task": config.dataset, "trained_at": config.loss_rate, "seed": config.seed}
    finite = record["status"] != "not finite"
    most_frequent = {"accuracy": record["data"]["majority_share"], "cross_entropy": None, "packets": 0, "lost": 0}
    rows = [{**key, "evaluated_at": rate, **(_outcome(config, rate) if finite else most_frequent)} for rate in rates]
    for name in MODELS:
        shutil.rmtree(folder / name, ignore_errors=True)
    return pd.DataFrame(rows)[[*KEY, *most_frequent]]


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """What training at a loss rate gains in accuracy over training without losses, paired by seed.

    Args:
        table: a row an evaluation, with `task`, `trained_at`, `evaluated_at`, `seed` and `accuracy`; has models that
            were trained at 0.

    One row for each task, rate of evaluation and rate of training, the latter 0 without a difference: `task`,
    `evaluated_at`, `trained_at`, and what `contrasts.contrasts` gives: `seeds`, `mean`, `mean_low`, `mean_high`,
    `difference`, `low`, `high`, `p`, and `p_holm`, corrected over all rows.

    ValueError where no model was trained at 0, or two rows are of one task, rates and seed.
    """
    twice = table[table.duplicated(KEY)]
    if len(twice):
        task, trained_at, rate, seed = twice.iloc[0][KEY]
        raise ValueError(
            f"{task} is twice evaluated at {rate:g}, trained at {trained_at:g}, seed {seed}: leave one out"
        )
    runs = table.assign(arm="trained at " + table["trained_at"].map("{:g}".format), loss_rate=table["trained_at"])
    compared = contrasts(runs, reference="trained at 0", outcome="accuracy", within=("task", "evaluated_at"))
    return compared.drop(columns="arm").rename(columns={"loss_rate": "trained_at"})


def changes(table: pd.DataFrame) -> pd.DataFrame:
    """What losses in evaluation change in each model's accuracy; `gains` of it tell whom they harm less.

    Args:
        table: as of `gains`; has every model evaluated at 0.

    The rows evaluated at other rates, `accuracy` less the same model's without losses.
    """
    key = ["task", "trained_at", "seed"]
    without = table[table["evaluated_at"] == 0].set_index(key)["accuracy"].rename("without")
    lossy = table[table["evaluated_at"] > 0].join(without, on=key)
    return lossy.assign(accuracy=lossy["accuracy"] - lossy["without"])[table.columns]


def _outcome(config: TrainConfig, rate: float) -> dict[str, Any]:
    """Accuracy, cross-entropy, packets and losses of the run's last model at a loss rate, evaluated if not yet done."""
    from lossytp.training.evaluation import EVALUATION, run

    folder, model = Path(config.output_dir, f"{EVALUATED}{rate}"), Path(config.output_dir, "last")
    if (folder / EVALUATION).is_file():
        result = json.loads((folder / EVALUATION).read_text(encoding="utf-8"))
    elif not model.is_dir():
        raise ValueError(
            f"{config.output_dir} is not evaluated at {rate:g}, and its model was deleted: delete this folder, and its "
            "run is done again"
        )
    else:
        network = {field.name: getattr(config, field.name) for field in fields(NetworkConfig)}
        task = {"dataset": config.dataset, "max_length": config.max_length, "model_name": str(model)}
        result = run(EvaluateConfig(**network | task | {"loss_rate": rate, "output_dir": str(folder)}))
        print(f"evaluation at {rate:g}: accuracy {result['lossy']['accuracy']:.4f}", file=sys.stderr, flush=True)
    outcome = {name: result["lossy"][name] for name in ("accuracy", "cross_entropy")}
    return outcome | {name: result["network"][name] for name in ("packets", "lost")}
