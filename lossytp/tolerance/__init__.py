"""How much loss one model bears, without training: `python -m lossytp.tolerance`."""
