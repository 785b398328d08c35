"""Answer the paper's questions from tables and records, one module a question."""
