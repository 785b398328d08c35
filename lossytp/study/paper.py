"""Make the paper's contents from the records: one function per section draws its figures and returns its numbers.

A function skips what the profile's experiments do not have, and returns nothing for it. The sections about what
predicts the cost are in `lossytp.study.paper_predictors`, those about other models in `lossytp.study.paper_models`, and
those about pretraining in `lossytp.study.paper_pretraining`.
"""

import json
from collections.abc import Callable
from typing import Any

import pandas as pd

from lossytp.study.analysis.break_even import price_of_reliability, step_ratios_of_both_phases
from lossytp.study.analysis.overview import compute_hours, summarise_runs
from lossytp.study.analysis.parallelisms import against_tensor_parallelism, traffic_a_step
from lossytp.study.analysis.repairs import advise
from lossytp.study.analysis.robustness import evaluation_changes, gains
from lossytp.study.analysis.tolerance import task_settings, tolerance_curves, tune_learning_rates
from lossytp.study.analysis.training_length import (
    changes_in_longest_training,
    falls_by_length,
    gain_from_longer_training,
    network_name,
    slowdowns,
)
from lossytp.study.claims import check_claims
from lossytp.study.figures.arms import drops_against, drops_by_arm, replica_divergence
from lossytp.study.figures.curves import (
    accuracy_against_evaluated_loss,
    accuracy_against_loss,
    burst_distribution,
    price_against_loss,
)
from lossytp.study.figures.main import delayed_or_lost, fall_against_loss
from lossytp.study.finished_runs import HEADLINE, Study
from lossytp.study.paper_models import real_model, real_training, sizes
from lossytp.study.paper_predictors import law, predictions, together
from lossytp.study.paper_pretraining import pretraining, pretraining_gpt2
from lossytp.study.records import joined, json_rows, with_lossless
from lossytp.study.run_measures import (
    copy_spreads,
    mean_by_arm,
    speed_and_traffic,
    stream_distances,
)
from lossytp.training.files import write_atomically
from lossytp.training.models import MODELS
from lossytp.training.shapes import shape_of

LONGEST = ("14_converged", "14_converged_longer")
HIDDEN = "rescale|clipped"  # arms of parallelisms that lie on others in the figure; the appendix lists them


def runs(study: Study) -> dict[str, Any]:
    """Return what the runs themselves are: number, machines, repeatability, cost."""
    table = joined(study.tables).reset_index(drop=True).join(speed_and_traffic(study.every_record))
    write_atomically(study.results / "experiment_summary.csv", table.to_csv(index=False))
    return {
        "study": summarise_runs(study.every_record),
        "budget": json_rows(compute_hours(study.experiments.values(), study.records)),
    }


def tolerance(study: Study) -> dict[str, Any]:
    """Return how much loss is borne: curves, loss budgets, the tasks and the model."""
    headline, records = study.complete(HEADLINE, 1)
    curves = with_lossless(headline)
    for name in ("01_tolerance_of_both_phases", "03_rings"):
        other, _ = study.complete(name)
        curves = pd.concat([curves, with_lossless(other)], ignore_index=True)
    study.draw(fall_against_loss(curves), "tolerance")
    study.draw(accuracy_against_loss(curves), "accuracy_vs_loss")
    model_name = records[0]["config"]["model_name"]
    shape, pretraining = shape_of(model_name), MODELS / model_name / "pretrain.json"
    pretrained = None
    if pretraining.is_file():
        measured = json.loads(pretraining.read_text(encoding="utf-8"))
        pretrained = {"tokens": measured["tokens"]}
    return {
        "tasks": task_settings(records, study.baselines),
        "shape": shape and {name: getattr(shape, name) for name in ("width", "layers")},
        "pretrained": pretrained,
        "tolerance": tolerance_curves(curves),
        "tolerance_contrasts": json_rows(study.comparisons[HEADLINE]),
    }


def comparisons(study: Study) -> dict[str, Any]:
    """Return every other experiment's arms, what to do on each network, and which repairs help."""
    others = {name: table for name, table in study.comparisons.items() if name != HEADLINE}
    if "04_where" in others:
        study.draw(drops_by_arm(others["04_where"]), "04_where")
    if "06_repair" in others:
        axes = {"extra_packet_share": "packets sent beyond the messages, as a share"}
        study.draw(drops_against(others["06_repair"], axes, front=True), "06_repair_cost")
    return {
        "comparisons": {name: json_rows(compared) for name, compared in others.items()},
        "practice": advise(study.comparisons) if HEADLINE in study.comparisons else [],
    }


def longer(study: Study) -> dict[str, Any]:
    """Return what longer training regains, and what other learning rates change."""
    table, _ = study.complete("01_training")
    if table.empty:
        return {}
    longest, _ = study.complete(LONGEST[0])
    of_each_length = [table[table["max_steps"] == table["max_steps"].max()], *([] if longest.empty else [longest])]
    curves = tolerance_curves(pd.concat(map(with_lossless, of_each_length), ignore_index=True))
    learning_rate = study.records[HEADLINE][0]["config"]["learning_rate"]
    names = ("01_training", HEADLINE, "01_tolerance_of_both_phases", *LONGEST)
    several = [(study.comparisons[name], study.configs(name)) for name in names if name in study.comparisons]
    lengths = falls_by_length(several, learning_rate)
    if len(lengths):
        study.draw(delayed_or_lost(lengths), "longer")
    runs = _runs_by_length(study, learning_rate)
    return {
        "retuned": tune_learning_rates(table[table["max_steps"] == table["max_steps"].min()]),
        "regained": gain_from_longer_training(table),
        "longer": [curve for curve in curves if len(curve["points"]) > 2],  # one rate alone says little of a budget
        "lengths": json_rows(lengths),
        "slowdowns": {} if runs.empty else slowdowns(runs),
        "longest_changes": {
            outcome: changes_in_longest_training(runs, outcome)
            for outcome in ("accuracy_lossy", "cross_entropy_clean")
            if not runs.empty
        },
    }


def _runs_by_length(study: Study, learning_rate: float) -> pd.DataFrame:
    """Return the runs of the tasks that have the longest trainings, with the name of their network."""
    longest = [study.complete(name)[0] for name in LONGEST if name in study.comparisons]
    if not longest:
        return pd.DataFrame()
    tasks = set(longest[0]["task"])
    runs = pd.concat([*longest, study.complete("01_training")[0]], ignore_index=True)
    runs = runs[(runs["learning_rate"] == learning_rate) & runs["task"].isin(tasks)]
    named = runs[["loss_rate", "algorithm", "reliable_gather"]].itertuples(index=False, name=None)
    names = pd.Series([network_name(*network) if network[0] else None for network in named], index=runs.index)
    return runs.assign(network=names)


def parallelisms(study: Study) -> dict[str, Any]:
    """Return which parallelism bears loss best."""
    if "07_parallelisms" not in study.comparisons:
        return {}
    axes = {"loss_rate": "packet loss rate", "lost_a_step": "packets lost a step"}
    table = study.comparisons["07_parallelisms"]
    alone = table[~table["arm"].str.contains(HIDDEN, regex=True)]
    study.draw(drops_against(alone, axes), "parallelisms")
    return {"parallelisms": json_rows(against_tensor_parallelism(study.complete("07_parallelisms")[0]))}


def implementations(study: Study) -> dict[str, Any]:
    """Return what each implementation of tensor parallelism sends in a training step."""
    table, records = study.complete("07_implementations")
    if table.empty:
        return {}
    return {"implementations": json_rows(mean_by_arm(table, [traffic_a_step(record) for record in records]))}


def replicas(study: Study) -> dict[str, Any]:
    """Draw how far replicas diverge if sums return with losses."""
    table, records = study.complete("05_replicas")
    if table.empty:
        return {}
    study.draw(replica_divergence(stream_distances(table, records), copy_spreads(table, records)), "divergence")
    return {}


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


def price(study: Study) -> dict[str, Any]:
    """Return how many times longer reliable steps take, and when losing beats retransmitting."""
    step_times = pd.read_csv(study.results / "step_times.csv")
    prices = price_of_reliability(step_times)
    table, records = study.complete("01_training")
    ratios = None
    if not table.empty:
        longest = [record for record in records if record["config"]["max_steps"] == table["max_steps"].max()]
        ratios = step_ratios_of_both_phases(longest)
    study.draw(price_against_loss(prices, ratios), "price")
    return {"price": json_rows(prices), "message_bytes": int(step_times["message_bytes"].iloc[0])}


def channel(study: Study) -> dict[str, Any]:
    """Return how far measured losses are from their closed forms."""
    study.draw(burst_distribution(pd.read_csv(study.results / "bursts.csv")), "burst_lengths")
    table = pd.read_csv(study.results / "channel.csv")
    farthest = float(table["standard_errors_off"].abs().max())
    return {"channel": {"comparisons": len(table), "farthest_standard_errors": farthest}}


SECTIONS: tuple[Callable[[Study], dict[str, Any]], ...] = (
    runs, tolerance, comparisons, law, predictions, together, longer, pretraining, pretraining_gpt2, sizes, real_model,
    real_training, parallelisms, implementations, replicas, robustness, price, channel,
)  # fmt: skip


OF_ANY_GRID = (runs, comparisons)


def make(study: Study) -> dict[str, Any]:
    """Draw all figures, check the claims of the paper's profile, and write and return paper.json.

    Grids of your own, without the study's headline, get the sections `OF_ANY_GRID` alone.
    """
    paper: dict[str, Any] = {}
    for section in SECTIONS if HEADLINE in study.experiments else OF_ANY_GRID:
        paper |= section(study)
    if study.profile == "paper":
        paper["claims"] = check_claims(paper)
    write_atomically(study.results / "paper.json", json.dumps(paper, indent=1, allow_nan=False) + "\n")
    return paper
