"""Measure how much loss a language model bears without training: `python -m lossytp.tolerance`.

`after_training` also fine-tunes a model under loss, and measures it then.
"""

COLLAPSE_NATS = 3.0  # a block that rises by more has collapsed
