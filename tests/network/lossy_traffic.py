"""Networks that lose packets, and what is drawn from them and sent over them."""

import pytest

from lossytp.network import Bernoulli, GilbertElliott, Wire
from lossytp.network.routes import DIRECT as direct

BERNOULLI = Bernoulli(loss_rate=0.1)
BURSTS = GilbertElliott.from_loss_and_burst(loss_rate=0.1, mean_burst_packets=8)
NOTHING, EVERYTHING = Bernoulli(loss_rate=0), Bernoulli(loss_rate=1)
TWO_FLOATS = Wire(mtu_bytes=52, header_bytes=44)  # a packet carries two fp32 elements
RANKS = (0, 1, 2, 3)
both_processes = pytest.mark.parametrize("process", [BERNOULLI, BURSTS], ids=["bernoulli", "bursts"])


def packets_of(missing):
    """As lists, which can be compared."""
    return [packets.tolist() for packets in missing.packets]


def drawn(network, src=0, dst=1, num_packets=1000, **where):
    return network.lost_packets(src, dst, num_packets, **where).tolist()


def sent(network):
    missing = network.send(direct.reduce(4000, RANKS), 4)
    return packets_of(missing), missing.reliable


def loses(network):
    return any(sent(network)[0])
