"""Measure how much loss a language model bears without training: `python -m lossytp.tolerance`."""

COLLAPSE_NATS = 3.0  # a block that rises by more has collapsed
