"""Where do losses hurt: which phase, direction, layer; and does training with losses help?"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lossytp.network.checks import check_filled, check_probability
from lossytp.study.statistics import t_interval
from lossytp.study.style import COLUMN, shared_legend
from lossytp.study.tables import LOSSLESS
from lossytp.training.config import EvaluateConfig, TrainConfig
from lossytp.training.files import remove
from lossytp.training.groups import TaskSettings
from lossytp.training.record import read_record
from paper.comparisons import compare_arms, json_rows, lossy_changes
from paper.repairs import replica_divergence
from paper.study import (
    POINTS,
    Claim,
    Results,
    Study,
    band,
    claim,
    loss_rate_axis,
    row_of,
    rows_of,
    shown,
    task_name,
    tasks,
)

EVALUATED = "evaluated_at_"  # prefix of an evaluation's folder in the run's folder; the loss rate follows
STRONGEST_FILE = "strongest_packet.json"  # in the run's folder, from `paper.real_model`


def stream_distances(table: pd.DataFrame, records: list[dict[str, Any]]) -> pd.DataFrame:
    """Tabulate the relative distances between ranks' residual streams, from `lossytp.parallel.own_streams`.

    Args:
        table: one row per run, with `task`, `arm` and `seed`.
        records: the records of the same runs. Runs whose ranks share a stream have no rows.

    Returns:
        Columns task, arm, seed, step, layer (from 1) and distance.
    """
    return pd.DataFrame(
        [
            {**run, "step": point["step"], "layer": layer, "distance": distance}
            for run, point in _evaluations(table, records)
            for layer, distance in enumerate(point["stream_distance"] or (), 1)
        ],
        columns=["task", "arm", "seed", "step", "layer", "distance"],
    )


def copy_spreads(table: pd.DataFrame, records: list[dict[str, Any]]) -> pd.DataFrame:
    """Tabulate the relative spread of replicated parameters, from `lossytp.parallel.replicas.replica_drift`.

    The spread is measured before replicas are synchronised. It is the range from the smallest to the largest copy of
    each value. For four Gaussian ranks, that is over twice the distance from the mean, which `stream_distances`
    measures.

    Args:
        table: one row per run, with `task`, `arm` and `seed`.
        records: the records of the same runs. Runs whose ranks share a stream have no rows.

    Returns:
        Columns task, arm, seed, step and spread.
    """
    return pd.DataFrame(
        [
            {**run, "step": point["step"], "spread": point["replica_drift"]}
            for run, point in _evaluations(table, records)
            if point["stream_distance"]
        ],
        columns=["task", "arm", "seed", "step", "spread"],
    )


def _evaluations(table: pd.DataFrame, records: list[dict[str, Any]]) -> list[tuple[dict, dict]]:
    """Return each evaluation with the task, arm and seed of its run."""
    runs = table[["task", "arm", "seed"]].to_dict("records")
    return [(run, point) for run, record in zip(runs, records, strict=True) for point in record["curves"]["eval"]]


def remove_models(output_dir: Path) -> None:
    """Delete the models that a run saved, but no file that lossytp did not write."""
    for name in ("best", "last"):
        remove(output_dir / name)


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
    check_filled("evaluated_at", evaluated_at)
    for rate in evaluated_at:
        check_probability("evaluated_at", rate)
    rates = sorted({float(rate) for rate in evaluated_at})
    if not config.output.save_model:
        raise ValueError("save_model = False leaves no model to evaluate: set it to True")
    if config.network.lossy_direction == "backward":
        raise ValueError("lossy_direction = 'backward' loses nothing in evaluation: leave it out")
    for rate in rates:
        config.replace(loss_rate=rate or 0.5)  # raises if the loss type has its own rate, before hours of training
    train(config)
    run = {"task": config.data.dataset, "trained_at": config.network.loss_rate, "seed": config.network.seed}
    table = pd.DataFrame([run | {"evaluated_at": rate} | evaluate_at(config, rate) for rate in rates])
    remove_models(Path(config.output.output_dir))
    return table[[*KEY, "accuracy", "cross_entropy", "packets", "lost"]]


def train(config: TrainConfig) -> dict[str, Any]:
    """Train unless the run is finished, and return its record. Delete measurements of an earlier run first."""
    from lossytp.training.evaluation import EVALUATION
    from lossytp.training.loop import run

    folder = Path(config.output.output_dir)
    if read_record(folder) is None:
        for stale in (*folder.glob(f"{EVALUATED}*/{EVALUATION}"), *folder.glob(STRONGEST_FILE)):
            stale.unlink()
    return run(config)


def evaluate_at(config: TrainConfig, rate: float, repair: str | None = None) -> dict[str, Any]:
    """Return the last model's accuracy, cross-entropy, packets and losses at a loss rate; evaluate it if necessary.

    A run that diverged saved no model. It scores the most frequent class, as in `final_accuracies`.

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
    folder, model = Path(config.output.output_dir, name), Path(config.output.output_dir, "last")
    record = read_record(Path(config.output.output_dir))
    if record is not None and record["status"] == "not finite":
        return {"accuracy": record["data"]["majority_share"], "cross_entropy": None, "packets": 0, "lost": 0}
    if (folder / EVALUATION).is_file():
        result = json.loads((folder / EVALUATION).read_text(encoding="utf-8"))
    elif not model.is_dir():
        with_repair = "" if repair is None else f" with repair = {repair!r}"
        raise ValueError(
            f"{config.output.output_dir} has no evaluation at {rate:g}{with_repair}, and its model was deleted: delete "
            "this folder and train again"
        )
    else:
        shared = config.network.as_dict() | config.compute.as_dict()
        task = {name: getattr(config.data, name) for name in (*TaskSettings.known(), "max_length")} | {
            "model_name": str(model)
        }
        result = run(EvaluateConfig.from_dict(shared | task | changed | {"output_dir": str(folder)}))
        print(f"{folder.name}: accuracy {result['lossy']['accuracy']:.4f}", file=sys.stderr, flush=True)
    found = {name: result["lossy"][name] for name in ("accuracy", "cross_entropy")}
    return found | {name: result["network"][name] for name in ("packets", "lost")}


def gain_from_longer_training(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return how much less accuracy the largest rate costs in the longest runs than in the shortest.

    Args:
        table: runs of several lengths, with and without losses. Only the longest runs' learning rate counts.

    Returns:
        One mapping a task: the lengths `steps` and `longer_steps`, and the `gain`, paired by seed.
    """
    found = []
    lossy = lossy_changes(table)
    learning_rate = lossy.sort_values("max_steps")["learning_rate"].iloc[-1]
    lossy = lossy[(lossy["loss_rate"] == lossy["loss_rate"].max()) & (lossy["learning_rate"] == learning_rate)]
    for task, runs in lossy.groupby("task", sort=False):
        by_length = runs.pivot(index="seed", columns="max_steps", values="change")
        short, long = by_length.columns.min(), by_length.columns.max()
        gain = t_interval((by_length[long] - by_length[short]).dropna().to_numpy())
        found.append({"task": str(task), "steps": int(short), "longer_steps": int(long), "gain": gain.as_json()})
    return found


KEY = ["task", "trained_at", "evaluated_at", "seed"]


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """Compute the gain in accuracy of training at a loss rate over training without losses, paired by seed.

    Args:
        table: one row per evaluation, with `task`, `trained_at`, `evaluated_at`, `seed` and `accuracy`. Some models
            were trained at rate 0.

    Returns:
        One row for each task, rate of evaluation and rate of training: `task`, `evaluated_at`, `trained_at`, and the
        columns of `comparisons.compare_arms` from `seeds` on.

    Raises:
        ValueError: if no model was trained at 0, or two rows share task, rates and seed.
    """
    twice = table[table.duplicated(KEY)]
    if len(twice):
        task, trained_at, rate, seed = twice.iloc[0][KEY]
        raise ValueError(
            f"{task} is evaluated twice at {rate:g}, trained at {trained_at:g}, seed {seed}: leave one out"
        )
    runs = table.assign(arm="trained at " + table["trained_at"].map("{:g}".format), loss_rate=table["trained_at"])
    compared = compare_arms(runs, reference="trained at 0", outcome="accuracy", within=("task", "evaluated_at"))
    return compared.drop(columns="arm").rename(columns={"loss_rate": "trained_at"})


def evaluation_changes(table: pd.DataFrame) -> pd.DataFrame:
    """Compute how losses in evaluation change each model's accuracy, as input to `gains`.

    Args:
        table: as for `gains`; every model is evaluated at 0.

    Returns:
        The rows evaluated at other rates, their `accuracy` less the same model's at 0.
    """
    key = ["task", "trained_at", "seed"]
    without = table[table["evaluated_at"] == 0].set_index(key)["accuracy"].rename("without")
    lossy = table[table["evaluated_at"] > 0].join(without, on=key)
    return lossy.assign(accuracy=lossy["accuracy"] - lossy["without"])[table.columns]


def accuracy_against_evaluated_loss(table: pd.DataFrame) -> Figure:
    """Draw accuracy against the loss rate in evaluation, one line per loss rate in training, one panel per task.

    Points are means over seeds, bands Student's 95 % intervals.

    Args:
        table: one row per evaluation, with `task`, `trained_at`, `evaluated_at`, `seed` and `accuracy`.
    """
    tasks, trained_at = list(dict.fromkeys(table["task"])), sorted(table["trained_at"].unique())
    figure, axes_1T = plt.subplots(1, len(tasks), figsize=(COLUMN, 2.2), layout="constrained", squeeze=False)
    for ax, task in zip(axes_1T[0], tasks, strict=True):
        ours = table[table["task"] == task].rename(columns={"evaluated_at": "loss_rate"})
        for number, rate in enumerate(trained_at):
            label = f"{100 * rate:g} % loss" if rate else LOSSLESS
            band(ax, ours[ours["trained_at"] == rate], "loss_rate", "accuracy", label=label, number=number)
        ax.set_title(task_name(task))
        ax.set_xlabel("loss rate in evaluation, %")
        loss_rate_axis(ax, table["evaluated_at"])
    axes_1T[0, 0].set_ylabel("test accuracy")
    shared_legend(figure, axes_1T[0, 0], title="trained with")
    return figure


def robustness(study: Study) -> dict[str, Any]:
    """Return whether training under loss makes a model robust to it."""
    file = study.results / "robustness" / "evaluations.csv"
    if not file.is_file():
        return {}
    evaluated = pd.read_csv(file)
    study.draw(accuracy_against_evaluated_loss(evaluated), "robustness")
    return {
        "robustness": json_rows(gains(evaluated)),
        "sensitivity": json_rows(gains(evaluation_changes(evaluated))),
    }


def replicas(study: Study) -> dict[str, Any]:
    """Draw how far replicas diverge if sums return with losses."""
    table, records = study.complete("05_replicas")
    if table.empty:
        return {}
    study.draw(replica_divergence(stream_distances(table, records), copy_spreads(table, records)), "divergence")
    return {}


@claim
def forward_losses_hurt(results: Results) -> Claim:
    """Require that losses in backward alone show no cost, and cost less than losses in forward."""
    arms = results["comparisons"]["04_where"]
    numbers: dict[str, float] = {}
    holds = True
    for task in tasks(results):
        forward, backward = row_of(arms, task=task, arm="forward only"), row_of(arms, task=task, arm="backward only")
        holds &= not shown(backward["p_holm"]) and backward["difference"] > forward["high"]
        numbers |= {
            f"{task}, backward": -POINTS * backward["difference"],
            f"{task}, forward": -POINTS * forward["high"],
        }
    return Claim(holds, numbers)


@claim
def gather_phase_costs_more(results: Results) -> Claim:
    """Require that losses in the gather phase cost more than in the reduce phase, after Holm's correction."""
    rows = [row_of(results["comparisons"]["04_where"], task=task, arm="gather phase only") for task in tasks(results)]
    holds = all(row["gain"] < 0 and shown(row["gain_p_holm"]) for row in rows)
    return Claim(holds, {row["task"]: POINTS * row["gain"] for row in rows})


@claim
def first_layer_costs_most(results: Results) -> Claim:
    """Require that the first layer's interval lies above every later layer's mean, in docstrings."""
    rows = rows_of(results["comparisons"]["04_where"], task="docstrings")
    first, *later = (row for row in rows if row["arm"].startswith("layers"))
    highest = max(-row["difference"] for row in later)
    return Claim(-first["high"] > highest, {"first": -POINTS * first["high"], "later": POINTS * highest})


@claim
def lossy_averages_cost_more(results: Results) -> Claim:
    """Require in each task that averaging replicated gradients over lossy links costs more, with intervals apart."""
    rows = results["comparisons"]["05_replicas"]
    pairs = {
        task: [row_of(rows, task=task, arm=arm) for arm in ("averaged over lossy links", "never averaged")]
        for task in tasks(results)
    }
    apart = {task: POINTS * (never["low"] - averaged["high"]) for task, (averaged, never) in pairs.items()}
    return Claim(min(apart.values()) > 0, apart)


@claim
def evaluation_alone_costs_less(results: Results) -> Claim:
    """Require that losses in evaluation alone cost less than in training and evaluation, in docstrings, at 30 %."""
    alone = row_of(results["sensitivity"], task="docstrings", trained_at=0.0, evaluated_at=0.3)
    both = row_of(results["tolerance_contrasts"], task="docstrings", loss_rate=0.3)
    numbers = {"evaluation": -POINTS * alone["mean_low"], "training too": -POINTS * both["high"]}
    return Claim(numbers["evaluation"] < numbers["training too"], numbers)


@claim
def training_with_loss_does_not_pay(results: Results) -> Claim:
    """Require that training with losses never shows a gain, and does show less sensitivity to loss."""
    better = [row for row in results["robustness"] if shown(row["p_holm"])]
    best = max((row["difference"] for row in better), default=0.0)
    less_sensitive = row_of(results["sensitivity"], task="docstrings", trained_at=0.3, evaluated_at=0.3)
    holds = best <= 0 and less_sensitive["difference"] > 0 and shown(less_sensitive["p_holm"])
    return Claim(holds, {"largest difference that is shown": POINTS * best})
