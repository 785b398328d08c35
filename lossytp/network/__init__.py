"""Links that lose packets, and collectives as packet routes over them. Nothing here imports torch or knows models."""

from lossytp.network.losses import (
    PRESETS,
    Bernoulli,
    FourState,
    GilbertElliott,
    LossProcess,
    from_netem,
    gilbert_elliott_preset,
)
from lossytp.network.lossy_network import CommConfig, LossyNetwork
from lossytp.network.repairs import REPAIRS
from lossytp.network.routes import ALGORITHMS, SWITCH, Wire
from lossytp.network.scope import Scope, Site
from lossytp.network.traces import LOSS_PROCESSES, Correlated, PerPacket, Trace, loss_process_named

__all__ = [
    "ALGORITHMS",
    "LOSS_PROCESSES",
    "PRESETS",
    "REPAIRS",
    "SWITCH",
    "Bernoulli",
    "CommConfig",
    "Correlated",
    "FourState",
    "GilbertElliott",
    "LossProcess",
    "LossyNetwork",
    "PerPacket",
    "Scope",
    "Site",
    "Trace",
    "Wire",
    "from_netem",
    "gilbert_elliott_preset",
    "loss_process_named",
]
