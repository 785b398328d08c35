"""What a run's sums lacked, and what its repair sent and waited for: what accuracy is drawn against."""

import math
from typing import Any

import pandas as pd

from lossytp.network.packets import Wire
from lossytp.network.repairs import repair_named
from lossytp.network.theory import expected_squared_error, missing_share
from lossytp.network.transport import Path
from lossytp.training.config import TrainConfig

MESSAGE_BYTES = 8 * 1024 * 768 * 2 // 4  # a chunk of GPT-2 124M's sums: 8 texts of 1,024 tokens, bf16, 4 ranks
PATH = Path(bandwidth_bits_per_s=10e9, round_trip_s=100e-6, wire=Wire())


def costs(record: dict[str, Any]) -> dict[str, float]:
    """Of one run, shares of its messages' own packets: `missing_packet_share` in the end, and `extra_packet_share`.

    Only messages that may lose packets count, so of an all-reduce whose results return reliably, the reduce phase.
    `lost_a_step` is how many packets were lost on average in a training step, those of a repair among them.
    `time` is how many times as long a message of `MESSAGE_BYTES` takes over `PATH` as without a repair, when as large
    a share is sent beyond it and each retransmission waits a round trip.
    """
    traffic = record["network"]["training"]
    own = traffic["packets"] - traffic["extra"]
    extra = traffic["extra"] / own if own else 0.0
    repair = repair_named(record["config"]["repair"])
    message_s = PATH.wire.num_packets(MESSAGE_BYTES, 1) * PATH.packet_s
    return {
        "missing_packet_share": traffic["missing"] / own if own else 0.0,
        "extra_packet_share": extra,
        "lost_a_step": traffic["lost"] / record["timing"]["steps"],
        "time": 1 + (extra * message_s + repair.round_trips * PATH.round_trip_s) / (message_s + PATH.round_trip_s / 2),
    }


def theory(record: dict[str, Any], coherence: dict[str, float]) -> dict[str, float]:
    """What `lossytp.network.theory` expects of a run's sums, losses everywhere.

    `missing_share` of their contributions, and their `squared_error`, relative to their square. NaN where what is
    gathered is no sum: sequence parallelism's stream, whose results may be lost.

    Args:
        coherence: of contributions, by number of ranks: from `lossytp.study.coherence`.
    """
    config = TrainConfig.from_dict(record["config"])
    ranks = config.tensor_parallel_size
    if config.sequence_parallel and not config.reliable_gather:
        return {"missing_share": math.nan, "squared_error": math.nan}
    wiring, loss_rate = config.wiring(), config.process().loss_rate
    return {
        "missing_share": missing_share(wiring, ranks, loss_rate),
        "squared_error": expected_squared_error(wiring, ranks, loss_rate, coherence[str(ranks)]),
    }


def by_arm(table: pd.DataFrame, values: list[dict[str, float]]) -> pd.DataFrame:
    """Means of `values`, of the runs that are the table's rows, for each task, arm and loss rate."""
    where = ["task", "arm", "loss_rate"]
    together = pd.concat([table[where].reset_index(drop=True), pd.DataFrame(values)], axis=1)
    return together.groupby(where, sort=False, as_index=False).mean()
