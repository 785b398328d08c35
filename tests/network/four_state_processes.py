"""Processes of netem's four-state loss of many kinds."""

from lossytp.network import FourState

KEY = (0, "test")
PROCESSES = {
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
