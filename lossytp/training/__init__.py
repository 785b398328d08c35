"""Tasks, data, the training loop and its records. Knows nothing of notebooks or figures."""
