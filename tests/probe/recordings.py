"""Synthetic recordings of each family, and a packet-by-packet reference of the likelihood."""

import numpy as np

from lossytp.network import Bernoulli, FourState, GilbertElliott, Trace

TRUTHS = {
    "Bernoulli": Bernoulli(loss_rate=0.02),
    "simple Gilbert": GilbertElliott(p_good_to_bad=0.005, p_bad_to_good=0.25),
    "Gilbert-Elliott": GilbertElliott(p_good_to_bad=0.002, p_bad_to_good=0.05, loss_bad=0.4, loss_good=0.001),
    "four-state Markov": FourState(0.004, 0.1, 0.15, 0.2, 0.003),
}
VALUES = {
    "Bernoulli": (0.05,),
    "simple Gilbert": (0.03, 0.3),
    "Gilbert-Elliott": (0.01, 0.06, 0.6, 0.02),
    "four-state Markov": (0.02, 0.2, 0.3, 0.4, 0.01),
}  # of the parameters, near no truth


def recorded(process, *lengths, seed=0):
    """Flows of these lengths."""
    return [
        Trace(lost=process.losses((seed, "test", number)).take(length), num_packets=length)
        for number, length in enumerate(lengths)
    ]


def bits(text):
    """A flow from its zeros and ones."""
    return Trace.from_indicators([int(bit) for bit in text])


def log_likelihood(chain, flows):
    """The log-likelihood of the flows, with one matrix a packet."""
    steps, total = ((1 - chain.loss)[:, None] * chain.transition, chain.loss[:, None] * chain.transition), 0.0
    for flow in flows:
        state = chain.start
        for fate in np.isin(np.arange(flow.num_packets), flow.lost).astype(int):
            state = state @ steps[fate]
            total += np.log(state.sum())
            state = state / state.sum()
    return total
