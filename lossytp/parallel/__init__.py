"""Tensor-parallel GPT-2 over a lossy network. Knows nothing of tasks or training."""
