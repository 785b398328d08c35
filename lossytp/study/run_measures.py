"""Compute what each run lost and sent, and how far its ranks diverged."""

from typing import Any

import pandas as pd

from lossytp.study.records import TRAINING


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
    """Tabulate what `experiment_summary.csv` adds to `records.tidy`, one row per record.

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
