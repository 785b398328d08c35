"""Links that lose packets, and collectives as packet routes over them. Nothing here imports torch or knows models."""

from lossytp.network.algorithms import ALGORITHMS
from lossytp.network.bernoulli import Bernoulli
from lossytp.network.correlated import Correlated
from lossytp.network.counters import Site
from lossytp.network.four_state import FourState
from lossytp.network.gilbert_elliott import GilbertElliott
from lossytp.network.loss_process import LossProcess
from lossytp.network.loss_processes import LOSS_PROCESSES, loss_process_named
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.packets import Wire
from lossytp.network.per_packet import PerPacket
from lossytp.network.presets import PRESETS, from_netem, gilbert_elliott_preset
from lossytp.network.repairs import REPAIRS
from lossytp.network.routes import SWITCH
from lossytp.network.scope import Scope
from lossytp.network.trace import Trace
from lossytp.network.wiring import Wiring

__all__ = [
    "ALGORITHMS",
    "LOSS_PROCESSES",
    "PRESETS",
    "REPAIRS",
    "SWITCH",
    "Bernoulli",
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
    "Wiring",
    "from_netem",
    "gilbert_elliott_preset",
    "loss_process_named",
]
