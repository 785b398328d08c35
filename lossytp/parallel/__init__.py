"""Tensor-parallel decoders over a lossy network. This package knows no tasks or training."""
