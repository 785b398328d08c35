"""The paper: its text, and one module for each of its questions."""
