"""The setting that names a task: one of the project's own, or a file that declares one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

from lossytp.training.config.settings import Settings
from lossytp.training.tasks import TASKS, Task, task_named
from lossytp.training.tasks.declared import DECLARATIONS, declared_task, read_declaration
from lossytp.training.tasks.sources import FORMATS


def _from_json(words: list[str]) -> Any:
    try:
        return json.loads(words[0])
    except ValueError as error:
        raise ValueError(f"declaration = {words[0][:60]!r} is not JSON ({error}): give --dataset FILE.yaml") from None


JsonFlag = PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=_from_json,
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)


@dataclass(frozen=True, kw_only=True)
class TaskSettings(Settings):
    """The task of a run. The content of a file that declares one is part of the configuration, and so of records."""

    dataset: str | None = None
    """The task: one of TASKS, or a YAML file that declares one of your own. A configuration keeps the task's name."""
    declaration: Annotated[dict, JsonFlag] | None = None
    """What that file declares. Do not give this: --dataset FILE.yaml sets it, and records keep it."""
    task_folder: str | None = None
    """Folder where the declaration's relative paths start, which --dataset FILE.yaml sets too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset is not None and self.declaration is None:
            folder, dataset = self.task_folder, self.dataset
            self._read(Path(dataset).expanduser())
            if folder is not None and (self.declaration is None or folder != self.task_folder):
                raise ValueError(f"task_folder = {folder!r} does not go with dataset = {dataset!r}: leave it out")
        if self.declaration is not None and self.declaration.get("name") != self.dataset:
            raise ValueError(
                f"dataset = {self.dataset!r} does not go with the declaration of {self.declaration.get('name')!r}: "
                "leave declaration out, or give this name"
            )
        if self.dataset is not None:
            self.definition()

    @classmethod
    def result_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the result depends on. Records without a declaration do not mention it."""
        kept = super().result_of(values)
        return {name: value for name, value in kept.items() if (name, value) != ("declaration", None)}

    def definition(self) -> Task:
        """Return the task: its source, texts, labels and metrics.

        Raises:
            ValueError: if there is none of this name, or its declaration is wrong.
        """
        assert self.dataset is not None
        if self.declaration is None:
            return task_named(self.dataset)
        return declared_task(self.declaration, self.task_folder)

    def _read(self, file: Path) -> None:
        """Replace a file's path by the name, the declaration and the folder that it gives."""
        if file.suffix in DECLARATIONS:
            declaration = read_declaration(file)
            for name, value in (
                ("dataset", declaration["name"]),
                ("declaration", declaration),
                ("task_folder", str(file.parent.absolute())),
            ):
                object.__setattr__(self, name, value)
        elif (plain := str(self.dataset).lower().replace("-", "_")) in TASKS and self.dataset not in TASKS:
            object.__setattr__(self, "dataset", plain)  # ARC-Easy, as earlier studies wrote it
        elif file.suffix in FORMATS and not file.is_file():
            raise ValueError(f"dataset = {self.dataset!r} does not exist: give the path of a file, or a task's name")
        elif file.suffix in FORMATS:
            from lossytp.training.tasks.suggested import suggestion  # reading rows takes seconds to import

            raise ValueError(suggestion(file))
