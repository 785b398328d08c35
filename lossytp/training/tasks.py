"""The tasks by name. Importing this module costs nothing; a task's text is loaded when it is asked for."""

from collections.abc import Callable
from typing import NamedTuple

from lossytp.training import docstrings

Example = tuple[str, int]  # text, label


class Task(NamedTuple):
    """A classification task: label names, the text, and what its text depends on besides this code."""

    labels: tuple[str, ...]
    load: Callable[[], dict[str, list[Example]]]  # {"train": ..., "test": ...}
    version: Callable[[], str]


TASKS = {"docstrings": Task(docstrings.LIBRARIES, docstrings.load_docstrings, docstrings.version)}
