"""Links that lose packets, and collectives as packet routes over them. Knows nothing of torch or of models."""

from lossytp.network.algorithms import ALGORITHMS
from lossytp.network.bernoulli import Bernoulli
from lossytp.network.counters import Site
from lossytp.network.gilbert_elliott import GilbertElliott
from lossytp.network.lossy_network import LossyNetwork
from lossytp.network.packets import Wire
from lossytp.network.presets import PRESETS, from_netem, gilbert_elliott_preset
from lossytp.network.repairs import REPAIRS
from lossytp.network.routes import SWITCH
from lossytp.network.scope import Scope

__all__ = [
    "ALGORITHMS",
    "PRESETS",
    "REPAIRS",
    "SWITCH",
    "Bernoulli",
    "GilbertElliott",
    "LossyNetwork",
    "Scope",
    "Site",
    "Wire",
    "from_netem",
    "gilbert_elliott_preset",
]
