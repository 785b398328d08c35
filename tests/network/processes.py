"""Loss processes of many kinds, and the key of their link."""

import numpy as np

from lossytp.network import Bernoulli, Correlated, FourState, GilbertElliott, PerPacket, Trace

KEY = (0, "training", 0, "tp", 0, 1)


def simple(loss_rate, mean_burst_packets):
    return GilbertElliott.from_loss_and_burst(loss_rate=loss_rate, mean_burst_packets=mean_burst_packets)


def general(p_good_to_bad, p_bad_to_good, loss_bad, loss_good):
    return GilbertElliott(
        p_good_to_bad=p_good_to_bad, p_bad_to_good=p_bad_to_good, loss_bad=loss_bad, loss_good=loss_good
    )


def shared_losses(loss_rate, shared, mean_burst_packets=None, switch=0):
    return Correlated.from_loss_and_share(
        loss_rate=loss_rate, shared=shared, mean_burst_packets=mean_burst_packets, switch=switch
    )


BERNOULLI = {f"rate {rate}": Bernoulli(loss_rate=rate) for rate in (0.001, 0.01, 0.1, 0.5, 0.9)}
GILBERT_ELLIOTT = {
    "burst 1": simple(0.05, 1),
    "burst 8": simple(0.01, 8),
    "burst 100": simple(0.1, 100),
    "most are lost": simple(0.8, 8),
    "both states lose": general(0.01, 0.1, loss_bad=0.7, loss_good=0.02),
    "bad state loses some": general(0.005, 0.3, loss_bad=0.65, loss_good=0),
    "good state loses more": general(0.2, 0.05, loss_bad=0.4, loss_good=0.9),
    "states take turns": general(0.9, 0.8, loss_bad=0.95, loss_good=0.05),
    "states lose alike": general(0.1, 0.1, loss_bad=0.1, loss_good=0.1),
}
FOUR_STATE = {
    "all four states": FourState(0.02, 0.2, 0.1, 0.3, 0.01),
    "bursts with few pauses": FourState(0.005, 0.05, 0.3, 0.4, 0.001),
    "single losses follow upon each other": FourState(0.1, 0.3, 0.3, 0.5, 0.8),
    "no state is kept": FourState(0.5, 0.4, 0.6, 1, 0.5),
    "a loss every other packet": FourState(0.5, 0.5, p14=0.5),
    "no single losses": FourState(0.03, 0.2, 0.2, 0.1),
    "no pauses": FourState(0.03, 0.2, p14=0.02),
    "single losses alone": FourState(0, 0.2, 0.1, 0.3, 0.05),
    "a burst for ever": FourState(0.01, 0, 0.3, 0.2, 0.4),
}
CORRELATED = {
    "half is shared": shared_losses(0.05, 0.5),
    "bursts are shared": shared_losses(0.05, 0.6, 8),
    "little is shared": shared_losses(0.2, 0.1, 2),
    "most are lost and shared": shared_losses(0.7, 0.5, 6),
    "parts of one's own": Correlated(common=simple(0.02, 10), private=Bernoulli(loss_rate=0.03)),
    "four states at the switch": Correlated(common=FourState(0.02, 0.2, 0.1, 0.3, 0.01), private=simple(0.02, 10)),
}
MARKOV = BERNOULLI | GILBERT_ELLIOTT | FOUR_STATE | CORRELATED
EDGES = {  # exactly periodic, absorbing, lossless or losing all
    "nothing": Bernoulli(loss_rate=0),
    "everything": Bernoulli(loss_rate=1),
    "nearly nothing": Bernoulli(loss_rate=1e-15),
    "nearly everything": Bernoulli(loss_rate=1 - 2**-53),
    "certain transitions": general(1, 1, loss_bad=1, loss_good=0),
    "certain departure": general(1, 0.3, loss_bad=1, loss_good=0.9),
    "never bad": general(0, 0.5, loss_bad=1, loss_good=0.4),
    "never good again": general(0.5, 0, loss_bad=0.9, loss_good=0),
    "lossless states": general(0.1, 0.2, loss_bad=0, loss_good=0),
    "four states by turns": FourState(1, 1),
    "lost for ever": FourState(0.01, 0),
    "delivered for ever": FourState(0.01, 0.1, 0.2, 0),
    "all is shared": shared_losses(0.1, 1, 8),
    "none is shared": shared_losses(0.1, 0, 8),
}
OTHERS = {
    "one lost packet": Trace(lost=[0], num_packets=1),
    "a short recording": Trace(lost=[2, 3, 4], num_packets=7),
    "a recording": Trace(lost=np.flatnonzero(np.random.default_rng(1).random(3000) < 0.1), num_packets=3000),
    "a lossless recording": Trace(lost=[], num_packets=5),
    "a recorded switch": Correlated(common=Trace(lost=[0, 1], num_packets=50), private=Bernoulli(loss_rate=0.01)),
    "every tenth": PerPacket(lambda packets, uniforms: packets % 10 == 0),
    "a function of both": PerPacket(lambda packets, uniforms: (packets % 100 < 20) & (uniforms < 0.5)),
}
ALL = MARKOV | EDGES | OTHERS
