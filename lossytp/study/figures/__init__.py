"""Draw the paper's figures, only from tables."""
