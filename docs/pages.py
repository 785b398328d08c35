"""Write the pages that the build makes: copies of the lessons, and the pages of the study."""

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

LESSONS = ("00_explore", "12_collectives", "40_lab", "60_my_model")


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
    """Write a page for each question of the paper: its figures, and its claims with their conditions and numbers."""
    results = docs.parent / "results" / "paper"
    checked = json.loads((results / "paper.json").read_text(encoding="utf-8"))["claims"]
    captions = dict(re.findall(r'#(?:drawn|plate)\("(\w+)",\s*\[(.*?)\]\)', _text(docs, "lossytp.typ"), re.DOTALL))
    names, runs = [], len(list((results / "runs").iterdir()))
    for file in sorted((docs.parent / "paper").glob("*.py")):
        question = import_module(f"paper.{file.stem}")
        claims, source = _claims_of(question.__name__), _text(docs, file.name)
        if file.stem == "build" or not claims:
            continue
        lines = [f"# {file.stem.replace('_', ' ').capitalize()}", "", (question.__doc__ or "").strip(), ""]
        for name, caption in captions.items():
            if f'"{name}"' in source:
                sentences = [each for each in re.split(r"(?<=\.) ", caption) if "#" not in each]
                lines += [f"![](../../results/paper/figures/{name}.png)", "", " ".join(sentences), ""]
        lines += ["## Claims", "", "The build of the paper stops if one of these conditions no longer holds.", ""]
        lines += ["| condition | holds | numbers |", "|---|---|---|"]
        for claim in claims:
            condition = " ".join((claim.__doc__ or claim.__name__).split()).removeprefix("Require that ")
            found = checked[claim.__name__]
            numbers = "; ".join(f"{name}: {value:.3g}" for name, value in found["numbers"].items())
            lines.append(f"| {condition.replace('|', ' ')} | {'yes' if found['holds'] else 'no'} | {numbers} |")
        write_if_changed(docs / "study" / f"{file.stem}.md", "\n".join(lines) + "\n")
        names.append(file.stem)
    start = f"# The study\n\nThe study trained {runs:,} runs. Each question has a page, with its figures and claims.\n"
    start += "The paper itself is `results/paper/lossytp.pdf`.\n\n```{toctree}\n"
    write_if_changed(docs / "study" / "index.md", start + "\n".join(names) + "\n```\n")


def _claims_of(module: str) -> list[Callable]:
    from paper.study import CLAIMS

    return [claim for _, claim in sorted(CLAIMS.items()) if claim.__module__ == module]


def _text(docs: Path, name: str) -> str:
    return (docs.parent / "paper" / name).read_text(encoding="utf-8")


def write_ratios(docs: Path) -> None:
    """Write a page with the speed ratios that `./run_all.sh bench` has measured."""
    lines = ["# Speed", "", "`./run_all.sh bench` measures these ratios side by side, on one thread: the median of the"]
    lines += [
        "repeats, between its quartiles.",
        "",
        "| line | arm | ratio | quartiles | repeats | target |",
        "|---|---|---|---|---|---|",
    ]
    records = [json.loads(file.read_text("utf-8")) for file in sorted((docs.parent / "results/bench").glob("*.json"))]
    for record in records:
        for arm, found in record["ratios"].items():
            low, high = found["quartiles"]
            row = f"{record['line']}, against {record['against']} | {arm} | {found['ratio']:.3g}"
            lines.append(
                f"| {row} | {low:.3g} to {high:.3g} | {record['arms'][arm]['repeats']} | {found['target'] or ''} |"
            )
    machines = {json.dumps(record["environment"] | {"commit": record["commit"]}) for record in records}
    write_if_changed(docs / "study" / "speed.md", "\n".join([*lines, "", *sorted(machines)]) + "\n")
