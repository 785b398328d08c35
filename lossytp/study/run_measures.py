"""Compute what each run's messages lacked and cost, and how far its ranks diverged."""

import math
from typing import Any

import pandas as pd

from lossytp.network.packets import Wire
from lossytp.network.theory import expected_squared_error, missing_share
from lossytp.network.transport import Path
from lossytp.study.statistics import t_interval
from lossytp.training.config import settings_class

MESSAGE_BYTES = 8 * 1024 * 768 * 2 // 4  # one chunk of GPT-2 124M's all-reduce: 8 texts of 1,024 tokens, bf16, 4 ranks
PATH = Path(bandwidth_bits_per_s=10e9, round_trip_s=100e-6, wire=Wire())


def traffic_costs(record: dict[str, Any]) -> dict[str, float]:
    """Return what one run's messages lacked, and what its repair cost.

    Only messages that may lose packets count; of an all-reduce with a reliable gather, the reduce phase.

    Returns:
        - `missing_packet_share`: packets missing after repair, as a share of the messages' own packets.
        - `extra_packet_share`: packets that the repair sends, as such a share.
        - `lost_a_step`: mean number of packets lost in a training step, including those of the repair.
        - `time`: the duration of a message of `MESSAGE_BYTES` over `PATH`, relative to one without repair. The repair
          sends its share of extra packets, and each retransmission waits a round trip.
    """
    traffic = record["network"]["training"]
    own = traffic["packets"] - traffic["extra"]
    extra = traffic["extra"] / own if own else 0.0
    config = settings_class(record["config"]).from_dict(record["config"])
    repair, loss_rate = config.wiring().repair, config.process().loss_rate
    num_packets = PATH.wire.num_packets(MESSAGE_BYTES, 1)
    message_s = num_packets * PATH.packet_s
    waits = repair.round_trips(loss_rate, num_packets)
    return {
        "missing_packet_share": traffic["missing"] / own if own else 0.0,
        "extra_packet_share": extra,
        "lost_a_step": traffic["lost"] / record["timing"]["steps"],
        "time": 1 + (extra * message_s + waits * PATH.round_trip_s) / (message_s + PATH.round_trip_s / 2),
    }


def expected_errors(record: dict[str, Any], coherence: dict[str, float]) -> dict[str, float]:
    """Return what `lossytp.network.theory` expects of a run's sums if every message may lose packets.

    Args:
        record: the run's record.
        coherence: coherence of the ranks' contributions, by number of ranks, from `measurements.collectives.coherence`.

    Returns:
        `missing_share` of the contributions and the sums' relative `squared_error`. Both are NaN where ranks gather a
        sequence-parallel stream that may lose packets, since that is not a sum.
    """
    config = settings_class(record["config"]).from_dict(record["config"])
    ranks = config.tensor_parallel_size
    if config.sequence_parallel and not config.reliable_gather:
        return {"missing_share": math.nan, "squared_error": math.nan}
    wiring, loss_rate = config.wiring(), config.process().loss_rate
    return {
        "missing_share": missing_share(wiring, ranks, loss_rate),
        "squared_error": expected_squared_error(wiring, ranks, loss_rate, coherence[str(ranks)]),
    }


def mean_by_arm(table: pd.DataFrame, values: list[dict[str, float]]) -> pd.DataFrame:
    """Average `values`, one of each row of the table, over the seeds of each task, arm and loss rate."""
    where = ["task", "arm", "loss_rate"]
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
    each value, more than twice the distance from the mean that `stream_distances` measures, for four Gaussian ranks.

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


def mean_over_seeds(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """Average a column over seeds, with Student's 95 % interval as `low` and `high`.

    Runs whose value was not finite are left out.

    Args:
        table: with `seed` and the column; each combination of its other columns gives a row.
        value: the column's name.
    """
    table = table.dropna(subset=[value])
    where = [name for name in table if name not in ("seed", value)]
    estimates = table.groupby(where, sort=False)[value].apply(lambda values: t_interval(values.to_numpy()))
    return pd.DataFrame(estimates.tolist(), estimates.index, columns=[value, "low", "high"]).reset_index()
