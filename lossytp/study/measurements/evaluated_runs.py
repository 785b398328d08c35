"""Train, and evaluate the last model over other networks than that of its training."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from lossytp.network.checks import check_filled, check_probability
from lossytp.study.analysis.robustness import KEY
from lossytp.training.config import ComputeSettings, EvaluateConfig, NetworkSettings, TaskSettings, TrainConfig
from lossytp.training.record import read_record

EVALUATED = "evaluated_at_"  # prefix of an evaluation's folder in the run's folder; the loss rate follows
STRONGEST_FILE = "strongest_packet.json"  # in the run's folder, from `lossytp.tolerance.after_training`


def train_and_evaluate(config: TrainConfig, evaluated_at: Sequence[float]) -> pd.DataFrame:
    """Train, then evaluate the last model over the same network at other loss rates.

    Runs and evaluations that are finished are not repeated. The saved models are large, and are deleted once every
    evaluation is finished.

    All runs of one seed lose the same packets in an evaluation at one rate. These are not the packets of the run's own
    evaluation: at rate 0 accuracy equals the record's `accuracy_clean`, at the rate of training it is another sample of
    its `accuracy_lossy`.

    Args:
        config: the run's configuration.
        evaluated_at: loss rates.

    Returns:
        One row per rate: `task`, `trained_at`, `evaluated_at`, `seed`, `accuracy`, `cross_entropy` (nats an example),
        and the evaluation's `packets` and `lost`.

    Raises:
        ValueError: if `config` saves no model or loses packets only in backward, if there is no rate or one is
            outside [0, 1], if the loss type has its own rate, or if an evaluation is missing and its model was deleted.
            A model trained anew elsewhere could differ in its last digits from the one evaluated before.
    """
    from lossytp.training.saved_models import remove_models  # torch takes seconds to import; tables do not need it

    check_filled("evaluated_at", evaluated_at)
    for rate in evaluated_at:
        check_probability("evaluated_at", rate)
    rates = sorted({float(rate) for rate in evaluated_at})
    if not config.save_model:
        raise ValueError("save_model = False leaves no model to evaluate: set it to True")
    if config.lossy_direction == "backward":
        raise ValueError("lossy_direction = 'backward' loses nothing in evaluation: leave it out")
    for rate in rates:
        replace(config, loss_rate=rate or 0.5)  # raises if the loss type has its own rate, before hours of training
    train(config)
    run = {"task": config.dataset, "trained_at": config.loss_rate, "seed": config.seed}
    table = pd.DataFrame([run | {"evaluated_at": rate} | evaluate_at(config, rate) for rate in rates])
    remove_models(Path(config.output_dir))
    return table[[*KEY, "accuracy", "cross_entropy", "packets", "lost"]]


def train(config: TrainConfig) -> dict[str, Any]:
    """Train unless the run is finished, and return its record. Delete measurements of an earlier run first."""
    from lossytp.training.evaluation import EVALUATION
    from lossytp.training.loop import run

    folder = Path(config.output_dir)
    if read_record(folder) is None:
        for stale in (*folder.glob(f"{EVALUATED}*/{EVALUATION}"), *folder.glob(STRONGEST_FILE)):
            stale.unlink()
    return run(config)


def evaluate_at(config: TrainConfig, rate: float, repair: str | None = None) -> dict[str, Any]:
    """Return the last model's accuracy, cross-entropy, packets and losses at a loss rate; evaluate it if necessary.

    A run that diverged saved no model. It scores the most frequent class, as in `records.final_accuracies`.

    Args:
        config: the run's configuration.
        rate: of the evaluation.
        repair: of the evaluation; the run's own if left out.

    Raises:
        ValueError: if the evaluation is missing, and the model was deleted.
    """
    from lossytp.training.evaluation import EVALUATION, run

    changed: dict[str, Any] = {"loss_rate": rate} | ({} if repair is None else {"repair": repair})
    name = f"{EVALUATED}{rate}" + ("" if repair is None else "_" + re.sub(r"\W+", "-", repair).strip("-"))
    folder, model = Path(config.output_dir, name), Path(config.output_dir, "last")
    record = read_record(Path(config.output_dir))
    if record is not None and record["status"] == "not finite":
        return {"accuracy": record["data"]["majority_share"], "cross_entropy": None, "packets": 0, "lost": 0}
    if (folder / EVALUATION).is_file():
        result = json.loads((folder / EVALUATION).read_text(encoding="utf-8"))
    elif not model.is_dir():
        with_repair = "" if repair is None else f" with repair = {repair!r}"
        raise ValueError(
            f"{config.output_dir} has no evaluation at {rate:g}{with_repair}, and its model was deleted: delete this "
            "folder and train again"
        )
    else:
        shared = config.group(NetworkSettings) | config.group(ComputeSettings)
        task = config.group(TaskSettings) | {"max_length": config.max_length, "model_name": str(model)}
        result = run(EvaluateConfig(**shared | task | changed | {"output_dir": str(folder)}))
        print(f"{folder.name}: accuracy {result['lossy']['accuracy']:.4f}", file=sys.stderr, flush=True)
    found = {name: result["lossy"][name] for name in ("accuracy", "cross_entropy")}
    return found | {name: result["network"][name] for name in ("packets", "lost")}
