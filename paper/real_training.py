"""What do losses cost a pretrained real model that is fine-tuned over them?"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lossytp.study.statistics import ONE_POINT, t_interval
from lossytp.study.style import COLUMN, estimates, shared_legend
from lossytp.study.tables import LOSSLESS, final_accuracies
from lossytp.training.batches import load_dataset
from lossytp.training.config import TrainConfig
from lossytp.training.files import write_atomically
from lossytp.training.models import load_model, load_tokenizer
from lossytp.training.record import read_record
from paper.comparisons import json_rows, loss_rate_of, paired_p, with_holm
from paper.real_model import ADVISED, BEST, FEW, NAMES, NOTHING, RETRANSMITTING, _named, expected_round_trips
from paper.robustness import STRONGEST_FILE, evaluate_at, remove_models, train
from paper.study import FALL, POINTS, Claim, Results, Study, claim, row_of, rows_of, shown, task_name
from paper.sums import packet_norms, summary

CONTRASTS = {  # both models and repairs of a difference in accuracy: trained over, evaluated with
    "training under loss": ((NOTHING, NOTHING), (LOSSLESS, NOTHING)),
    "a tenth": ((LOSSLESS, BEST), (LOSSLESS, NOTHING)),
    "a hundredth": ((LOSSLESS, FEW), (LOSSLESS, NOTHING)),
    "a tenth, not a hundredth": ((LOSSLESS, BEST), (LOSSLESS, FEW)),
    "protected training, a tenth": ((BEST, BEST), (LOSSLESS, BEST)),
    "protected training, a hundredth": ((BEST, FEW), (LOSSLESS, FEW)),
}


def outcomes(table: pd.DataFrame) -> pd.DataFrame:
    """Return the fall of each model with each repair, against the model that was trained and run without losses.

    Args:
        table: one row per model and repair: `task`, `seed`, `trained_at`, `trained_with`, `evaluated_with`, `accuracy`,
            `clean` and `strongest`.

    Returns:
        Columns `task`, `trained_over` ("no loss", or the repair of a training under loss), `evaluated_with`, `seeds`,
        `fall` as a share with its 95 % interval, Student's over seeds, as `low` and `high`, the same without losses as
        `clean_fall`, `clean_low` and `clean_high`, `strongest`, the mean ratio of the strongest packet to the median
        one, and `weakest`, the smallest over seeds.
    """
    runs = _named(table)
    key = ["task", "seed"]
    lossless = runs[runs["trained_over"] == LOSSLESS].drop_duplicates(key).set_index(key)["clean"].rename("lossless")
    rows: list[dict[str, Any]] = []
    names = ["task", "trained_over", "evaluated_with"]
    for values, ours in runs.join(lossless, on=key, how="inner").groupby(names, sort=False):
        fall, clean = (t_interval((ours["lossless"] - ours[name]).to_numpy()) for name in ("accuracy", "clean"))
        measured = {"seeds": len(ours), "fall": fall.value, "low": fall.low, "high": fall.high}
        measured |= {"clean_fall": clean.value, "clean_low": clean.low, "clean_high": clean.high}
        measured |= {"strongest": float(ours["strongest"].mean()), "weakest": float(ours["strongest"].min())}
        rows.append(dict(zip(names, values, strict=True)) | measured)
    return pd.DataFrame(rows)


def contrasts(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the gains in accuracy of `CONTRASTS` in each task, paired by seed, with their 95 % intervals.

    Args:
        table: as for `outcomes`.

    Returns:
        A mapping for each: `task`, `contrast`, `seeds`, the gain's `value`, `low` and `high`, as a share, `p` of
        Student's paired test and `p_holm`, corrected over all contrasts of all tasks.
    """
    found: list[dict[str, Any]] = []
    for task, ours in _named(table).groupby("task", sort=False):
        runs = ours.set_index(["trained_over", "evaluated_with", "seed"])["accuracy"].sort_index()
        for name, (better, worse) in CONTRASTS.items():
            gains = (runs.loc[better] - runs.loc[worse]).dropna()
            row = {"task": task, "contrast": name, "seeds": len(gains), "p": paired_p(gains.to_numpy())}
            found.append(row | t_interval(gains.to_numpy()).as_json())
    return json_rows(with_holm(pd.DataFrame(found)))


def gains_by_rate(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Return how much accuracy protection keeps at each loss rate, in training and evaluation, paired by seed.

    Args:
        runs: of one task, from `tidy`. Experiments that share runs may be joined.

    Returns:
        A mapping for each loss rate with both repairs: `loss_rate`, `seeds`, and the gain of `BEST` over `NOTHING` as a
        share, with its 95 % interval.
    """
    found = []
    for rate, ours in runs.drop_duplicates("run").query("loss_rate > 0").groupby("loss_rate"):
        by_repair = ours.pivot(index="seed", columns="repair", values="accuracy_lossy")
        if not {BEST, NOTHING} <= set(by_repair):
            continue
        gains = (by_repair[BEST] - by_repair[NOTHING]).dropna()
        found.append({"loss_rate": float(str(rate)), "seeds": len(gains), **t_interval(gains.to_numpy()).as_json()})
    return found


def first_fall(runs: pd.DataFrame, *, seeds: int) -> list[float]:
    """Return the fall of `ADVISED` over the first seeds, in points, and its 95 % interval; empty without such runs.

    Args:
        runs: from `tidy`, with the arm without losses.
        seeds: their number. Later seeds were added once these were seen.
    """
    if runs.empty or ADVISED not in set(runs["arm"]):
        return []
    accuracy = runs.pivot(index="seed", columns="arm", values="accuracy_lossy").sort_index().head(seeds)
    return [POINTS * each for each in t_interval((accuracy[LOSSLESS] - accuracy[ADVISED]).to_numpy())]


def real_model_after_training(table: pd.DataFrame) -> Figure:
    """Draw the fall in accuracy by the repair in evaluation, one mark for each network that a model was trained over.

    Args:
        table: from `outcomes`. Tasks have a panel each.
    """
    repairs = list(dict.fromkeys(table["evaluated_with"]))
    trained = list(dict.fromkeys(table["trained_over"]))
    tasks = list(dict.fromkeys(table["task"]))
    height = 0.9 + 0.16 * len(repairs) * len(trained)
    figure, axes_X = plt.subplots(
        1, len(tasks), figsize=(COLUMN, height), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for ax, task in zip(axes_X[0], tasks, strict=True):
        for number, name in enumerate(trained):
            rows = table[(table["trained_over"] == name) & (table["task"] == task)]
            places = [repairs.index(each) + 0.2 * (number - (len(trained) - 1) / 2) for each in rows["evaluated_with"]]
            label = name if name == LOSSLESS else f"losses, {NAMES.get(name, name)}"
            estimates(ax, places, POINTS * rows[FALL], number, across=True, markersize=4, elinewidth=1, label=label)
        ax.axvline(0, color="0.6", linewidth=0.8, zorder=0)
        ax.set(title=task_name(task), xlabel="fall, points")
    first = axes_X[0, 0]
    first.set_yticks(range(len(repairs)), [NAMES.get(each, each).replace(" + ", "\n+ ") for each in repairs])
    first.set_ylim(len(repairs) - 0.5, -0.5)
    first.set_ylabel("repair in evaluation")
    shared_legend(figure, first, max_columns=2)
    figure.legends[0].set_title("trained over")
    return figure


def real_training(study: Study) -> dict[str, Any]:
    """Return whether training under loss changes what the real model bears, and what repairs do after it."""
    files = [study.results / "real_model" / f"after_training_{task}.csv" for task in ("sst2", "qnli")]
    if not all(file.is_file() for file in files):
        return {}
    table = pd.concat([pd.read_csv(file) for file in files], ignore_index=True)
    rows = outcomes(table)
    study.draw(real_model_after_training(rows), "real_model_after_training")
    records = [record for name in ("13_real_model", "13_real_model_qnli") for record in study.records.get(name, [])]
    examples = {record["config"]["dataset"]: record["data"]["test_examples"] for record in records}
    by_rate = pd.concat([study.complete(name)[0] for name in ("13_real_model_rates", "13_real_model")])
    lossy = [record for record in records if loss_rate_of(record) > 0 and record["config"]["repair"] == NOTHING]
    return {
        "real_training": json_rows(rows),
        "real_training_examples": examples,
        "real_training_gains": contrasts(table),
        "real_training_round_trips": {
            task: {
                repair: fmean(
                    expected_round_trips(record, repair) for record in lossy if record["config"]["dataset"] == task
                )
                for repair in RETRANSMITTING
            }
            for task in examples
        },
        "real_gains_by_rate": gains_by_rate(by_rate) if len(by_rate) else [],
        "real_advised_first": first_fall(study.complete("13_real_model_advised")[0], seeds=3),
    }


@claim
def training_is_not_shown_to_help(results: Results) -> Claim:
    """Require in each task that training over losses shows no gain, neither without a repair nor with protection.

    Each is evaluated over the losses, and with the repair, of its training. In SST-2 training without a repair must
    harm, if not after correction.
    """
    gains = [_gains(results, name) for name in ("training under loss", "protected training, a tenth")]
    lows = {f"{task}, {number}": gain["low"] for number, each in enumerate(gains) for task, gain in each.items()}
    harmed = gains[0]["sst2"]
    holds = max(lows.values()) <= 0 and harmed["high"] < 0 and not shown(harmed["p_holm"])
    return Claim(holds, {name: POINTS * low for name, low in lows.items()})


@claim
def protection_keeps_accuracy_at_three_per_cent(results: Results) -> Claim:
    """Require that 3 % loss costs accuracy without a repair, and that the fall with protection is small.

    The unrepaired fall's interval lies above 0, the protected fall's ends below 2 points. What protection keeps must
    have an interval above 0 at 3 and 10 %, and not at 1 %. At 10 %, five seeds must show it.
    """
    none, tenth = (_at_rate(results, repair, 0.03) for repair in (NOTHING, BEST))
    gains = {row["loss_rate"]: row for row in results["real_gains_by_rate"]}
    numbers = {"unrepaired": -none["high"], "protected": -tenth["low"]}
    numbers |= {f"gain at {rate:g}": row["low"] for rate, row in gains.items()}
    holds = numbers["unrepaired"] > 0 and numbers["protected"] < 2 * ONE_POINT
    if set(gains) != {0.01, 0.03, 0.1}:
        return Claim(False, numbers)
    holds &= gains[0.01]["low"] <= 0 < min(gains[0.03]["low"], gains[0.1]["low"])
    five = row_of(results["comparisons"]["13_real_model_advised"], task="sst2", arm=BEST)
    holds &= gains[0.1]["seeds"] == five["seeds"] == 5 and shown(five["gain_p_holm"])
    return Claim(holds, {name: POINTS * value for name, value in numbers.items()})


@claim
def retransmission_keeps_accuracy(results: Results) -> Claim:
    """Require that at 10 % loss protection with one retransmission, in training too, costs less than two points.

    The interval, over five seeds, must include no fall.
    """
    row = row_of(results["comparisons"]["13_real_model_advised"], task="sst2", arm=ADVISED)
    holds = row["seeds"] == 5 and -row["low"] < 2 * ONE_POINT and row["high"] >= 0
    return Claim(holds, {"fall, at most": -POINTS * row["low"], "seeds": row["seeds"]})


@claim
def hadamard_does_not_help_fine_tuning(results: Results) -> Claim:
    """Require that at 10 % loss training and running with Hadamard alone costs as much as without a repair, or more.

    The mean falls are compared, so a gain cannot be shown.
    """
    falls = {repair: -POINTS * _at_rate(results, repair, 0.1)["difference"] for repair in ("hadamard(64)", NOTHING)}
    return Claim(falls["hadamard(64)"] >= falls[NOTHING], falls)


@claim
def low_rates_stay_uncertain_in_the_real_model(results: Results) -> Claim:
    """Require that both intervals at 1 % loss include no fall, and that Holm's correction shows no fall at 1 or 3 %."""
    rows = {(repair, rate): _at_rate(results, repair, rate) for repair in (NOTHING, BEST) for rate in (0.01, 0.03)}
    holds = not any(shown(row["p_holm"]) for row in rows.values())
    holds &= all(row["low"] <= 0 <= row["high"] for (_, rate), row in rows.items() if rate == 0.01)
    return Claim(holds, {f"p, {repair}, {rate:.0%}": row["p_holm"] for (repair, rate), row in rows.items()})


def _at_rate(results: Results, repair: str, rate: float) -> dict[str, Any]:
    """Return the fall after training and evaluation at a loss rate."""
    return row_of(results["comparisons"]["13_real_model_rates"], task="sst2", arm=f"{repair}, {rate:.0%}")


@claim
def strong_packets_mostly_stay(results: Results) -> Claim:
    """Require that the strongest packet stays hundreds of times as strong as the median one after unrepaired losses.

    In one seed of each task it must be at most a fifth of that.
    """
    under = {row["task"]: row for row in rows_of(results["real_training"], trained_over="zero")}
    numbers = {f"{task}, mean": row["strongest"] for task, row in under.items()}
    holds = min(numbers.values()) > 200 and all(5 * row["weakest"] < row["strongest"] for row in under.values())
    return Claim(holds, numbers | {f"{task}, weakest": row["weakest"] for task, row in under.items()})


@claim
def protection_must_cover_every_text(results: Results) -> Claim:
    """Require that protecting a hundredth harms short texts, and that a tenth keeps more, both after correction.

    The gain of a tenth against no repair must have an interval above 0, without being shown after correction.
    """
    names = ("a hundredth", "a tenth, not a hundredth", "a tenth")
    harm, more, tenth = (_gains(results, name)["sst2"] for name in names)
    holds = harm["high"] < 0 < more["low"] and shown(harm["p_holm"]) and shown(more["p_holm"])
    numbers = {"a hundredth, at most": harm["high"], "more, at least": more["low"], "a tenth, at least": tenth["low"]}
    holds &= tenth["low"] > 0 and not shown(tenth["p_holm"])
    return Claim(holds, {name: POINTS * number for name, number in numbers.items()})


@claim
def protected_training_helps_a_weaker_repair(results: Results) -> Claim:
    """Require that training with a tenth protected helps a model that runs with a hundredth, in SST-2 only."""
    gains = _gains(results, "protected training, a hundredth")
    holds = gains["sst2"]["low"] > 0 and shown(gains["sst2"]["p_holm"]) and gains["qnli"]["low"] <= 0
    return Claim(holds, {task: POINTS * gain["low"] for task, gain in gains.items()})


@claim
def protection_helps_in_qnli(results: Results) -> Claim:
    """Require that protecting a tenth gains in QNLI, without correction, and a hundredth neither gains nor harms."""
    tenth, hundredth = (_gains(results, name)["qnli"] for name in ("a tenth", "a hundredth"))
    numbers = {"a tenth, at least": POINTS * tenth["low"], "a hundredth, at least": POINTS * hundredth["low"]}
    holds = tenth["low"] > 0 and not shown(tenth["p_holm"]) and hundredth["low"] <= 0 <= hundredth["high"]
    return Claim(holds, numbers)


def _gains(results: Results, contrast: str) -> dict[str, dict[str, Any]]:
    """Return one contrast's gain in each task."""
    return {row["task"]: row for row in rows_of(results["real_training_gains"], contrast=contrast)}


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
    if not config.output.save_model:
        raise ValueError("save_model = False leaves no model to measure: set it to True")
    folder = Path(config.output.output_dir)
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
            "task": config.data.dataset,
            "seed": config.network.seed,
            "trained_at": config.network.loss_rate,
            "trained_with": config.network.repair,
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
    folder = Path(config.output.output_dir)
    file, model = folder / STRONGEST_FILE, folder / "last"
    if file.is_file():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    if not model.is_dir():
        raise ValueError(
            f"{folder} has no {STRONGEST_FILE}, and its model was deleted: delete this folder and train again"
        )
    tokenizer, length = load_tokenizer(str(model)), config.data.max_length
    data = load_dataset(
        config.data.dataset, tokenizer, max_length=length, train_samples=1, test_samples=TEXTS, task=config.definition()
    )
    batches = [data.test.batch(np.array([number])) for number in range(len(data.test))]
    texts = [batch["input_ids"][0][batch["attention_mask"][0].bool()] for batch in batches]
    settings = config.network
    table = summary(packet_norms(load_model(str(model)).eval(), texts, settings))
    (found,) = json.loads(table.nlargest(1, "ratio").to_json(orient="records"))
    write_atomically(file, json.dumps(found, indent=1) + "\n")
    return dict(found)
