"""Tensor-parallel language models over networks that lose packets.

>>> import lossytp as ltp
>>> network = ltp.LossyNetwork(ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.01, mean_burst_packets=8), seed=0)
>>> model = ltp.parallelize(gpt2, network, tensor_parallel_size=4)   # four virtual ranks, or this process's
>>> loss = model(**batch).loss; loss.backward()
>>> report = network.report()                                         # per layer, direction, link: packets, lost, rate

`lossytp.network` loses packets, `lossytp.parallel` shards a model over it, `lossytp.training` trains the model on a
task, and `lossytp.study` turns many runs into figures.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lossytp.network import (
    LOSS_PROCESSES,
    Bernoulli,
    Correlated,
    FourState,
    GilbertElliott,
    LossyNetwork,
    PerPacket,
    Scope,
    Trace,
    Wire,
    from_netem,
    gilbert_elliott_preset,
)

if TYPE_CHECKING:
    from lossytp.parallel.backend import init_process_group, reliable
    from lossytp.parallel.collectives import all_reduce
    from lossytp.parallel.convert import gather, parallelize, reliable_prefix
    from lossytp.parallel.own_streams import stream_distance

__version__ = "0.2.0"
__all__ = [
    "LOSS_PROCESSES",
    "Bernoulli",
    "Correlated",
    "FourState",
    "GilbertElliott",
    "LossyNetwork",
    "PerPacket",
    "Scope",
    "Trace",
    "Wire",
    "all_reduce",
    "from_netem",
    "gather",
    "gilbert_elliott_preset",
    "init_process_group",
    "parallelize",
    "reliable",
    "reliable_prefix",
    "stream_distance",
]
_NEEDS_TORCH = {
    "all_reduce": "lossytp.parallel.collectives",
    "gather": "lossytp.parallel.convert",
    "init_process_group": "lossytp.parallel.backend",
    "reliable": "lossytp.parallel.backend",
    "parallelize": "lossytp.parallel.convert",
    "reliable_prefix": "lossytp.parallel.convert",
    "stream_distance": "lossytp.parallel.own_streams",
}


def __getattr__(name: str) -> Any:
    """Import a name that needs torch and transformers on its first use, because they take seconds to import."""
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module 'lossytp' has no attribute {name!r}")
