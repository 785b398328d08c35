"""Relate the fall in accuracy to the bytes that are lost together, at equal loss rate."""

from collections.abc import Sequence

import pandas as pd

from lossytp.study.comparisons import with_falls
from lossytp.study.statistics import t_interval
from lossytp.training.config import TrainConfig
from lossytp.training.shapes import shape_of

ELEMENT_BYTES = 4  # of float32 on the wire


def lost_together(compared: pd.DataFrame, configs: Sequence[TrainConfig]) -> pd.DataFrame:
    """Return the arms that lose the same share of the traffic in pieces of different sizes.

    A piece is an element, a packet, the packets of a mean burst, or a rank's whole chunk of a message.

    Args:
        compared: one row per arm, from `comparisons.drops_and_gains`.
        configs: a configuration of each row.

    Returns:
        Columns `task`, `arm`, `loss_rate`, `bytes` lost together, `fall` in accuracy, as a share, with `low` and
        `high`. Arms that lose no pieces, such as Gaussian noise, and bursts of whole messages are left out.
    """
    together = pd.Series([_bytes_together(config) for config in configs], index=compared.index, dtype=float)
    table = with_falls(compared).assign(bytes=together)
    table = table.dropna(subset=["fall", "bytes"]).sort_values(["task", "bytes"], kind="stable")
    return table.drop_duplicates(["task", "bytes", "loss_rate"])[
        ["task", "arm", "loss_rate", "bytes", "fall", "low", "high"]
    ].reset_index(drop=True)


def _bytes_together(config: TrainConfig) -> float | None:
    """Return the mean size of what one loss event takes on one link; None if the arm is not of this kind."""
    shape = shape_of(config.model_name)
    if shape is None or config.control == "noise" or config.loss_type not in ("ber", "g-e"):
        return None
    if config.control == "elements":
        return ELEMENT_BYTES
    chunk = config.batch_size * config.max_length * shape.width * ELEMENT_BYTES / config.tensor_parallel_size
    if config.mtu_bytes < chunk:
        return config.mtu_bytes * (config.mean_burst_packets or 1.0)
    return None if config.loss_type == "g-e" else chunk


def packet_size_effect(runs: pd.DataFrame) -> pd.DataFrame:
    """Return how much more accuracy larger packets cost than the smallest, paired by seed.

    Args:
        runs: one row per run with losses, with `task`, `loss_rate`, `mtu_bytes`, `seed` and `accuracy_lossy`; at one
            loss rate per task. Runs that several experiments have count once.

    Returns:
        Columns `task`, `loss_rate`, `mtu_bytes`, `smallest_bytes`, `seeds`, and the `cost` as a share with Student's
        interval as `low` and `high`, of all but the smallest packets.
    """
    rows = []
    for (task, rate), ours in runs.groupby(["task", "loss_rate"], sort=False):
        by_seed = ours.drop_duplicates(["mtu_bytes", "seed"]).pivot_table(
            index="seed", columns="mtu_bytes", values="accuracy_lossy"
        )
        smallest, *larger = by_seed.columns
        for size in larger:
            pairs = (by_seed[smallest] - by_seed[size]).dropna().to_numpy()
            estimate = t_interval(pairs)
            row = {"task": task, "loss_rate": rate, "mtu_bytes": size, "smallest_bytes": smallest, "seeds": len(pairs)}
            rows.append(row | {"cost": estimate.value, "low": estimate.low, "high": estimate.high})
    return pd.DataFrame(rows)
