"""Draw the paper's figures from tables alone."""
