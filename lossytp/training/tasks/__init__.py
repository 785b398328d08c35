"""Define tasks: the source of their rows, how a row becomes text and a label, and the metrics of the answers.

Importing this package is cheap: a task loads its rows only when they are needed.
"""

from lossytp.training.tasks.catalogue import TASKS, task_named
from lossytp.training.tasks.kinds import Classification, Example, Generation, MultipleChoice, Regression, Task
from lossytp.training.tasks.sources import Files, Source, Table

__all__ = [
    "TASKS",
    "Classification",
    "Example",
    "Files",
    "Generation",
    "MultipleChoice",
    "Regression",
    "Source",
    "Table",
    "Task",
    "task_named",
]
