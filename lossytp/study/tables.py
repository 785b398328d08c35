"""Read records into tidy tables, and compare arms with the lossless one."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from lossytp.network.checks import check_known
from lossytp.study.grid import Experiment
from lossytp.study.statistics import holm, t_interval
from lossytp.training.config import RunSettings, settings_class
from lossytp.training.record import NEWER, read_record

LOSSLESS = "no loss"  # every grid's arm without losses
TRAINING = ("task", "model_name", "max_steps", "learning_rate")  # runs that share these are one training
NETWORK_COLUMNS = ("packets", "lost", "extra", "missing", "observed_loss_rate")
ACCURACIES = ("accuracy_clean", "accuracy_lossy")


def read_experiment(experiment: Experiment) -> tuple[pd.DataFrame, list[dict]]:
    """Read an experiment's finished cells, in the grid's order.

    Returns:
        The table of `tidy`, with two columns more, `arm` and `run` (the name of the record's folder); and the records.
    """
    found = [(cell, read_record(Path(cell.config.output.output_dir))) for cell in experiment.cells]
    done = [(cell, record) for cell, record in found if record is not None]
    records = [record for _, record in done]
    table = tidy(records)
    table.insert(0, "arm", [cell.arm for cell, _ in done])
    table.insert(1, "run", [_run(cell.config) for cell, _ in done])
    return table, records


def complete_seeds(
    experiment: Experiment, table: pd.DataFrame, records: list[dict], unlearned: pd.DataFrame, min_seeds: int = 1
) -> tuple[pd.DataFrame, list[dict]]:
    """Keep the runs of those tasks and seeds that have every arm, so that all arms share seeds.

    An arm with fewer than `min_seeds` runs of a task is left out, and limits no other arm. Every other arm limits all
    arms to its seeds. A training is left out if it lacks the lossless arm, or has no other arm, or is `unlearned`, and
    a task with fewer complete seeds.
    """
    if table.empty:
        return table, []
    without = set(unlearned[list(TRAINING)].itertuples(index=False, name=None))
    arms = {
        _run(cell.config): (*training, cell.arm, cell.config.network.process_rate)
        for cell in experiment.cells
        if (training := _training(cell.config)) not in without
    }
    finished = Counter(arms[run] for run in table["run"] if run in arms)
    enough = {arm for arm in arms.values() if finished[arm] >= min_seeds}
    compared: dict[bool, set[tuple]] = {True: set(), False: set()}  # trainings that have the lossless arm, and another
    for *its_training, arm, _ in enough:
        compared[arm == LOSSLESS].add(tuple(its_training))
    wanted = {run for run, arm in arms.items() if arm in enough and arm[:-2] in compared[True] & compared[False]}
    required = Counter(
        (cell.config.task, cell.config.network.seed) for cell in experiment.cells if _run(cell.config) in wanted
    )
    table = table[table["run"].isin(wanted)]
    keys = list(zip(table["task"], table["seed"], strict=True))
    complete = {key for key, count in Counter(keys).items() if count == required[key]}
    seeds = Counter(task for task, _ in complete)
    kept = table[np.array([key in complete and seeds[key[0]] >= min_seeds for key in keys], dtype=bool)]
    return kept.reset_index(drop=True), [records[number] for number in kept.index]


def _training(config: RunSettings) -> tuple:
    """Return a cell's values of the columns `TRAINING`."""
    return config.task, config.model_name, config.steps, config.optimizer.learning_rate


def _run(config: RunSettings) -> str:
    """Return the name of a run's folder, which no other configuration has."""
    return Path(config.output.output_dir).name


def tidy(records: list[dict]) -> pd.DataFrame:
    """Tabulate configuration, status, final metrics and the packets of training, one row per record.

    The table leaves out what differs between repeated runs of a cell, such as seconds, so that tables can be compared.
    It has no column for a task's declaration either, because the task's name stands for it, nor for settings that are
    newer than all of the records. Two records of one configuration and seed are an error: no copy is a second sample.
    """
    rows = []
    left_out = {"declaration", *newer_settings(records)}
    settings = [{n: v for n, v in record["config"].items() if n not in left_out} for record in records]
    for record, its_settings in zip(records, settings, strict=True):
        config = settings_class(record["config"]).from_dict(record["config"])
        rows.append(
            {
                "task": config.task,
                **(settings[-1] | its_settings),  # in the newest record's order
                "max_steps": config.steps,  # pretraining has another name for it
                "loss_rate": config.network.process_rate,
                "mean_burst_packets": float(f"{config.network.process().mean_burst_packets:.12g}"),
                "status": record["status"],
                "processes": record["processes"],
                **record["final"],
                **final_accuracies(record),
                **{name: record["network"]["training"].get(name) for name in NETWORK_COLUMNS},
                "majority_share": record["data"]["majority_share"],
            }
        )
    table = pd.DataFrame(rows)
    if len(table):
        for column in ACCURACIES:
            table[column] = table[column].astype(float)
        copies = table[[*settings[0], "processes"]].astype(str).duplicated()
        if copies.any():
            row = table[copies].iloc[0]
            raise ValueError(
                f"seed {row['seed']} at {row['loss_type']} {row['loss_rate']:g} has two records: tabulate them "
                "separately"
            )
        table["implementation"] = [record["implementation"] for record in records]  # the one that ran
    return table


def loss_rate_of(record: Mapping[str, Any]) -> float:
    """Return the stationary loss rate of a run's process. The setting `loss_rate` lacks that of a preset or a trace."""
    return settings_class(record["config"]).from_dict(record["config"]).network.process_rate


def final_accuracies(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Return a run's accuracies, by the names `ACCURACIES`; None in pretraining.

    A run that diverged scores the most frequent class's share: leaving it out would flatter.
    """
    if record["status"] == "not finite":
        return dict.fromkeys(ACCURACIES, record["data"]["majority_share"])
    return {name: record["final"][name] for name in ACCURACIES}


def newer_settings(records: list[dict]) -> set[str]:
    """Return the settings that are newer than all of these records, so that new settings do not change old tables."""
    return set.intersection(*(set(record.get(NEWER, ())) for record in records)) if records else set()


def with_lossless(table: pd.DataFrame) -> pd.DataFrame:
    """Add each task's lossless runs to all of its other arms, as the arm's rate 0.

    Tasks without such runs are dropped, since nothing could be said of their drops in accuracy.
    """
    if table.empty:  # it has no columns
        return table
    lossless, lossy = table[table["arm"] == LOSSLESS], table[table["arm"] != LOSSLESS]
    lossy = lossy[lossy["task"].isin(lossless["task"])]
    if lossy.empty:
        return lossless
    arms = []
    for (task, arm), runs in lossy.groupby(["task", "arm"], sort=False):
        arms += [lossless[lossless["task"] == task].assign(arm=str(arm)), runs]
    return pd.concat(arms, ignore_index=True)


def joined(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Join the tables of experiments, by name, and add a column `experiment`.

    Experiments without runs are left out, because their columns have no type and would turn whole numbers into floats.
    """
    return pd.concat([table.assign(experiment=name) for name, table in tables.items() if len(table)])


def json_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the table's rows for JSON, with null for missing and infinite values."""
    values = table.replace([math.inf, -math.inf], math.nan).astype(object).to_dict("records")
    return [{str(name): None if pd.isna(value) else value for name, value in row.items()} for row in values]


# Compare an experiment's arms, paired by seed.


MARGIN = 0.03  # of accuracy: a training learns its task if it beats the most frequent class by more


def compare_arms(
    table: pd.DataFrame, *, reference: str, outcome: str = "accuracy_lossy", within: Sequence[str] = TRAINING
) -> pd.DataFrame:
    """Compute each arm's mean outcome and its difference from the reference arm, paired by seed.

    Args:
        table: one row per run: `arm`, `loss_rate`, `seed` and the outcome, as `read_experiment` returns it.
        reference: the arm to compare with. It has one loss rate in each training. Arms of a training without it get no
            difference.
        outcome: the column to compare.
        within: columns that runs must share to be compared.

    Returns:
        One row for each training, arm and loss rate: the columns of `within`, `arm`, `loss_rate`, `seeds` (pairs),
        `mean`, `mean_low`, `mean_high`, `difference`, `low`, `high` (Student's 95 % interval over the pairs), `p`
        (Student's paired test) and `p_holm` (corrected over all rows). The reference has no difference, a single pair
        has no p.
    """
    check_known("reference", reference, sorted(table["arm"].unique()))
    rows = []
    for training, runs in table.groupby(list(within), sort=False):
        base = runs[runs["arm"] == reference].set_index("seed")[outcome]
        if not base.index.is_unique:
            raise ValueError(f"reference = {reference!r} has several loss rates: name an arm with one")
        for (arm, rate), ours in runs.groupby(["arm", "loss_rate"], sort=False):
            if ours["seed"].duplicated().any():
                raise ValueError(f"arm {arm!r} has a seed twice at rate {rate:g}: add what differs to `within`")
            own = t_interval(ours[outcome].to_numpy())
            row = dict(zip(within, training, strict=True)) | {"arm": arm, "loss_rate": rate, "seeds": len(ours)}
            row |= {"mean": own.value, "mean_low": own.low, "mean_high": own.high}
            pairs = (ours.set_index("seed")[outcome] - base).dropna().to_numpy()
            if arm != reference and len(pairs):
                between = t_interval(pairs)
                row |= {"seeds": len(pairs), "difference": between.value, "low": between.low, "high": between.high}
                row["p"] = paired_p(pairs)
            rows.append(row)
    result = pd.DataFrame(rows)
    return with_holm(result) if "p" in result else result


def with_holm(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with `p_holm`, their column `p` corrected over all rows that have one."""
    tested = rows["p"].dropna()
    return rows.assign(p_holm=pd.Series(holm(tested.to_numpy()), tested.index))


def paired_p(pairs: np.ndarray) -> float:
    """Return the p-value of Student's test that (S,) differences are 0 on average.

    It is NaN for a single pair, and for equal differences other than 0: ties of counts show no variance.
    """
    if len(pairs) < 2 or (np.ptp(pairs) == 0 and pairs[0] != 0):
        return float("nan")
    if np.ptp(pairs) == 0:
        return 1.0
    return float(stats.ttest_1samp(pairs, 0.0).pvalue)


def unlearned_trainings(table: pd.DataFrame) -> pd.DataFrame:
    """Return the trainings, in the columns `TRAINING`, that do not learn their task: they show nothing about losses.

    Such a training's mean lossless accuracy is at most `MARGIN` above the most frequent class's share. A training
    without a lossless run may still learn, and is not listed.
    """
    if table.empty:
        return pd.DataFrame(columns=list(TRAINING))
    runs = table[table["arm"] == LOSSLESS]
    learned = (runs["accuracy_lossy"] - runs["majority_share"]).groupby([runs[name] for name in TRAINING]).mean()
    return learned[learned <= MARGIN].index.to_frame(index=False)


def drops_and_gains(table: pd.DataFrame, *, reference: str | None) -> pd.DataFrame:
    """Compare every arm with the lossless arm, and with the reference arm if there is one.

    Args:
        table: from `read_experiment`.
        reference: the arm that gains are measured from.

    Returns:
        The columns of `compare_arms`, for accuracy evaluated with losses. The same differences follow for other
        outcomes, under names such as `clean`, `clean_low`, `clean_high` and `clean_p_holm`:

        - `clean`: accuracy evaluated without losses, which shows only the effect of losses in training.
        - `rise`: cross-entropy in nats, evaluated with losses; missing for an arm with a run that is not finite.
        - `gain`: the arm's change against the lossless arm, less the reference's, over all trainings of the task.
    """
    where = [*TRAINING, "arm", "loss_rate"]
    entropy = table["cross_entropy_lossy"].astype(float).replace([np.inf, -np.inf], np.nan)
    entropy = entropy.where(entropy.notna().groupby([table[name] for name in where]).transform("all"))
    found = compare_arms(table, reference=LOSSLESS)
    for name, outcome in (("clean", table["accuracy_clean"]), ("rise", entropy)):
        others = compare_arms(table.assign(outcome=outcome), reference=LOSSLESS, outcome="outcome")
        found = join_differences(found, others, where, name)
    if reference is None:
        return found
    gains = compare_arms(lossy_changes(table), reference=reference, outcome="change", within=("task",))
    return join_differences(found, gains, ["task", "arm", "loss_rate"], "gain")


def with_falls(compared: pd.DataFrame) -> pd.DataFrame:
    """Return a comparison with a `fall` for each difference; `low` and `high` become the interval of the fall."""
    return compared.assign(fall=-compared["difference"], low=-compared["high"], high=-compared["low"])


def lossy_changes(
    table: pd.DataFrame, *, within: Sequence[str] = TRAINING, outcome: str = "accuracy_lossy"
) -> pd.DataFrame:
    """Return the runs with losses, with their `change` against the lossless run of the same training and seed."""
    key = [*within, "seed"]
    lossless = table[table["arm"] == LOSSLESS].set_index(key)[outcome].rename("without")
    lossy = table[table["arm"] != LOSSLESS].join(lossless, on=key)
    return lossy.assign(change=lossy[outcome] - lossy["without"])


def join_differences(table: pd.DataFrame, compared: pd.DataFrame, where: list[str], name: str) -> pd.DataFrame:
    """Add the differences of `compared` to `table`, matched on the columns `where` and prefixed with `name`."""
    names = {"difference": name} | {each: f"{name}_{each}" for each in ("low", "high", "p_holm")}
    return table.merge(compared.reindex(columns=[*where, *names]).rename(columns=names), on=where, how="left")


# Compute what each run lost and sent, and how far its ranks diverged.


def traffic_costs(record: dict[str, Any]) -> dict[str, float]:
    """Return what one run lost, and what its repair sent.

    Only messages that may lose packets count; of an all-reduce with a reliable gather, the reduce phase.

    Returns:
        `extra_packet_share`, the packets that the repair sends, as a share of the messages' own; and `lost_a_step`, the
        mean number of packets lost in a training step, including those of the repair.
    """
    traffic = record["network"]["training"]
    own = traffic["packets"] - traffic["extra"]
    return {
        "extra_packet_share": traffic["extra"] / own if own else 0.0,
        "lost_a_step": traffic["lost"] / record["timing"]["steps"],
    }


def speed_and_traffic(records: list[dict[str, Any]]) -> pd.DataFrame:
    """Tabulate what `experiment_summary.csv` adds to `tidy`, one row per record.

    Columns that begin with `machine` hold for the machine of the run. `steps_to_target` counts steps to the run's
    `target_accuracy`, and `steps_to_0.7` those to its task's own target of 0.7. By direction and by operation follow
    packets, packets lost, calls, and calls that lost something, such as `backward_packets` and `all_gather_lossy`.
    """
    rows = []
    for record in records:
        timing, traffic = record["timing"], record["network"]["training"]
        reached = {"target": record["time_to_accuracy"]}
        reached |= {f"{each['target']:g}": each for each in record.get("times_to_targets", ())}
        machine = {name: timing[name] for name in ("step_seconds", "tokens_per_second")} | record["environment"]
        machine = {name: machine.get(name) for name in ("processor", "gpu", "step_seconds", "tokens_per_second")}
        machine["seconds_to"] = {name: each and each["seconds"] for name, each in reached.items()}
        row = {"machine": machine, "steps_to": {name: each and each["step"] for name, each in reached.items()}}
        for grouping in ("by_direction", "by_operation"):
            messages, only = traffic["messages"], len(traffic[grouping]) == 1
            for name, counts in traffic[grouping].items():
                calls = messages.get(grouping, {name: messages} if only else {}).get(name, {})  # old records lack some
                four = {**counts, **calls}
                row[name] = {each: four.get(each) for each in ("packets", "lost", "called", "lossy")}
        rows.append(row)
    return pd.json_normalize(rows, sep="_").convert_dtypes()  # whole numbers stay whole where some are missing


def mean_by_arm(table: pd.DataFrame, values: list[dict[str, float]]) -> pd.DataFrame:
    """Average `values`, one of each row of the table, over the seeds of each training, arm and loss rate."""
    where = [name for name in (*TRAINING, "arm", "loss_rate") if name in table]
    joined = pd.concat([table[where].reset_index(drop=True), pd.DataFrame(values)], axis=1)
    return joined.groupby(where, sort=False, as_index=False).mean()


def stream_distances(table: pd.DataFrame, records: list[dict[str, Any]]) -> pd.DataFrame:
    """Tabulate the relative distances between ranks' residual streams, from `lossytp.parallel.own_streams`.

    `table` has a row for each of the `records`. Runs whose ranks share a stream have no rows in the result, whose
    columns are task, arm, seed, step, layer (from 1) and distance.
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
    """Tabulate, as `stream_distances`, the spread of replicated parameters: `lossytp.parallel.replicas.replica_drift`.

    The spread is measured before replicas are synchronised. It is the range from the smallest to the largest copy of
    each value. For four Gaussian ranks, that is over twice the distance from the mean, which `stream_distances`
    measures.
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
