"""The documentation names what the library brings, and prints what its programs print."""

import doctest
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import lossytp
from tests.parallel.conftest import tiny_gpt2

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WITH_EXAMPLES = [file.relative_to(ROOT) for file in ROOT.glob("lossytp/**/*.py") if ">>>" in file.read_text("utf-8")]


@pytest.mark.parametrize("name", lossytp.__all__)
def test_every_public_name_has_an_example_that_the_site_runs(name):
    cells = re.findall(r"```{code-cell} python\n(.*?)```", (DOCS / "reference" / "lossytp.md").read_text(), re.DOTALL)
    assert any(re.search(rf"\bltp\.{name}\b", cell) for cell in cells)


def test_every_guide_is_on_the_site():
    for folder in ("howto", "concepts", "reference"):
        index = (DOCS / folder / "index.md").read_text()
        assert {file.stem for file in (DOCS / folder).glob("*.md")} - {"index"} <= set(index.split())


def without_numbers(line: str) -> str:
    return " ".join(re.sub(r"\d[\d.]*", "N", line).split())  # which depend on Python's own sources


@pytest.mark.slow
def test_the_first_command_prints_what_the_readme_shows(tmp_path, monkeypatch):
    monkeypatch.delenv("LOSSYTP_DATA", raising=False)  # whose WikiText-2 would be the text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python (-m lossytp\.tolerance [^#\n]+?) +#", readme, re.MULTILINE)
    (shown,) = re.findall(r"```text\n(gpt2-nano .*?)```", readme, re.DOTALL)
    command = [sys.executable, *command.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=600)
    printed = {without_numbers(line) for line in done.stdout.splitlines()}
    for line in filter(None, shown.splitlines()):
        assert line == "..." or without_numbers(line) in printed, line


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=str)
def test_examples_in_docstrings_run(file):
    gpt2 = tiny_gpt2()
    tokens = gpt2.dummy_inputs["input_ids"] % 10
    module = import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    names = {"gpt2": gpt2, "batch": {"input_ids": tokens, "labels": tokens}}
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
