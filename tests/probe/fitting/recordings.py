"""Synthetic recordings of each family, and a packet-by-packet reference of what fitting computes block by block."""

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


def forward_backward(chain, flows):
    """Log-likelihood, and expected transitions (received, lost) and starts, with one matrix a packet."""
    log_likelihood, counts, starts = 0.0, np.zeros((2, *chain.transition.shape)), np.zeros(len(chain.start))
    steps = (chain.received, chain.lost)
    for flow in flows:
        fates = np.isin(np.arange(flow.num_packets), flow.lost).astype(int)
        forward, backward = [chain.start], [np.ones(len(chain.start))]
        for fate in fates:
            following = forward[-1] @ steps[fate]
            log_likelihood += np.log(following.sum())
            forward.append(following / following.sum())
        for fate in fates[::-1]:
            before = steps[fate] @ backward[-1]
            backward.append(before / before.sum())
        backward.reverse()
        for place, fate in enumerate(fates):
            joint = forward[place][:, None] * steps[fate] * backward[place + 1]
            counts[fate] += joint / joint.sum()
        first = forward[0] * backward[0]
        starts += first / first.sum()
    return log_likelihood, counts, starts
