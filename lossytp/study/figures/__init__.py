"""Draw figures: the paper's from tables, and a recorded network's from its trace."""
