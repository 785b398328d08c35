"""Tasks, data, the training loop and its records. This package knows nothing of notebooks or figures."""
