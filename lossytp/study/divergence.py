"""How far ranks with residual streams of their own are apart, as `lossytp.parallel.own_streams` measures it: tables."""

from typing import Any

import pandas as pd

from lossytp.study.statistics import t_interval


def stream_distances(table: pd.DataFrame, records: list[dict[str, Any]]) -> pd.DataFrame:
    """Distances of the ranks' residual streams: columns task, arm, seed, step, layer (from 1) and distance.

    Args:
        table: a row a run, with `task`, `arm` and `seed`.
        records: of the same runs. Those whose ranks share a stream have no rows.
    """
    return pd.DataFrame(
        [
            {**run, "step": point["step"], "layer": layer, "distance": distance}
            for run, point in _evaluations(table, records)
            for layer, distance in enumerate(point["stream_distance"] or (), 1)
        ],
        columns=["task", "arm", "seed", "step", "layer", "distance"],
    )


def copy_distances(table: pd.DataFrame, records: list[dict[str, Any]]) -> pd.DataFrame:
    """Spread of the copies of the parameters that all ranks hold: columns task, arm, seed, step and spread.

    It is `lossytp.parallel.replicas.replica_drift`, measured before copies are brought together: from the largest to
    the smallest copy of each value, of four Gaussian ranks more than twice their distance from the mean, by which
    streams are measured.
    """
    return pd.DataFrame(
        [
            {**run, "step": point["step"], "spread": point["replica_drift"]}
            for run, point in _evaluations(table, records)
            if point["stream_distance"]
        ],
        columns=["task", "arm", "seed", "step", "spread"],
    )


def over_seeds(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """Mean of a column over seeds, and Student's 95 % interval as `low` and `high`, for all that the others tell.

    Runs whose value is missing, not having been finite, are left out.
    """
    table = table.dropna(subset=[value])
    where = [name for name in table if name not in ("seed", value)]
    estimates = table.groupby(where, sort=False)[value].apply(lambda values: t_interval(values.to_numpy()))
    return pd.DataFrame(estimates.tolist(), estimates.index, columns=[value, "low", "high"]).reset_index()


def _evaluations(table: pd.DataFrame, records: list[dict[str, Any]]) -> list[tuple[dict, dict]]:
    runs = table[["task", "arm", "seed"]].to_dict("records")
    return [(run, point) for run, record in zip(runs, records, strict=True) for point in record["curves"]["eval"]]
