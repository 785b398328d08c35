"""Write the pages that the build makes: copies of the lessons, and the pages of the study."""

import json
import re
from pathlib import Path

LESSONS = ("00_explore", "12_collectives", "60_my_model")


def write_if_changed(file: Path, text: str) -> None:
    """Write a file, unless it holds this text: Sphinx and its cache go by the time of the last change."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")


def copy_lessons(docs: Path) -> None:
    """Copy the lessons to docs/notebooks, without sliders and links to notebooks that are not on the site."""
    for name in LESSONS:
        notebook = json.loads((docs.parent / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
        cells = [cell for cell in notebook["cells"] if "sliders" not in cell["metadata"].get("tags", ())]
        for cell in cells:
            if cell["cell_type"] == "markdown":
                source = "".join(cell["source"])
                cell["source"] = re.sub(rf"\[([^]]+)\]\((?!({'|'.join(LESSONS)})\.ipynb)[^h)][^)]*\)", r"\1", source)
        write_if_changed(docs / "notebooks" / f"{name}.ipynb", json.dumps(notebook | {"cells": cells}, indent=1))


def write_study(docs: Path) -> None:
    """Write docs/study/index.md."""
    write_if_changed(docs / "study" / "index.md", "# The study\n")
