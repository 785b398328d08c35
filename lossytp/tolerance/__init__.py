"""Measure how much loss a model bears, without training: `python -m lossytp.tolerance`."""
