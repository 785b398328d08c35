"""Copy the lessons, and the analysis notebooks of the study, to where Sphinx executes them."""

import json
import re
from pathlib import Path

LESSONS = ("00_explore", "12_collectives", "40_lab", "60_my_model")
QUESTIONS = (
    "51_tolerance", "52_real_model", "53_models", "54_both_phases", "55_pretraining", "56_price", "57_sizes",
    "59_lost_together",
)  # fmt: skip


def write_if_changed(file: Path, text: str) -> None:
    """Write a file, unless it holds this text: Sphinx and its cache go by the time of the last change."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")


def copy_notebooks(docs: Path, names: tuple[str, ...], folder: str) -> None:
    """Copy notebooks to a folder of docs, without sliders and links to what is not in this folder."""
    for name in names:
        notebook = json.loads((docs.parent / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
        cells = [cell for cell in notebook["cells"] if "sliders" not in cell["metadata"].get("tags", ())]
        for cell in cells:
            if cell["cell_type"] == "markdown":
                source = "".join(cell["source"])
                cell["source"] = re.sub(rf"\[([^]]+)\]\((?!({'|'.join(names)})\.ipynb)[^h)][^)]*\)", r"\1", source)
        write_if_changed(docs / folder / f"{name}.ipynb", json.dumps(notebook | {"cells": cells}, indent=1))


def copy_lessons(docs: Path) -> None:
    """Copy the lessons to docs/notebooks."""
    copy_notebooks(docs, LESSONS, "notebooks")


def copy_study(docs: Path) -> None:
    """Copy the notebook of each question of the paper to docs/study, and write the index."""
    copy_notebooks(docs, QUESTIONS, "study")
    runs = len(list((docs.parent / "results" / "paper" / "runs").iterdir()))
    start = f"# The study\n\nThe study trained {runs:,} runs. Each question has a notebook that reads records.\n"
    start += "The paper itself is `results/paper/lossytp.pdf`.\n\n```{toctree}\n"
    pages = [*QUESTIONS, *(["speed"] if (docs / "study" / "speed.md").exists() else [])]
    write_if_changed(docs / "study" / "index.md", start + "\n".join(pages) + "\n```\n")


def write_ratios(docs: Path) -> None:
    """Write a page with the speed ratios that `./run_all.sh bench` has measured, if it has measured any."""
    records = [json.loads(file.read_text("utf-8")) for file in sorted((docs.parent / "results/bench").glob("*.json"))]
    if not records:
        return
    said = "measures these ratios side by side, on one thread: the median of the repeats, between its quartiles."
    lines = ["# Speed", "", f"`./run_all.sh bench` {said}", ""]
    lines += ["| line | arm | ratio | quartiles | repeats | target |", "|---|---|---|---|---|---|"]
    for record in records:
        for arm, found in record["ratios"].items():
            low, high = found["quartiles"]
            row = [f"{record['line']}, against {record['against']}", arm, f"{found['ratio']:.3g}"]
            row += [f"{low:.3g} to {high:.3g}", str(record["arms"][arm]["repeats"]), str(found["target"] or "")]
            lines.append(f"| {' | '.join(row)} |")
    machines = {json.dumps(record["environment"] | {"commit": record["commit"]}) for record in records}
    write_if_changed(docs / "study" / "speed.md", "\n".join([*lines, "", *sorted(machines)]) + "\n")
