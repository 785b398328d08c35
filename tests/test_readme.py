"""The README's command prints what the README shows, but for the numbers: these depend on Python's own sources."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def without_numbers(line: str) -> str:
    return " ".join(re.sub(r"\d[\d.]*", "N", line).split())


@pytest.mark.slow
def test_the_first_command_prints_what_the_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOSSYTP_DATA", raising=False)  # whose WikiText-2 would be the text
    (command,) = re.findall(r"^python (-m lossytp\.tolerance [^#\n]+?) +#", README, re.MULTILINE)
    (shown,) = re.findall(r"```text\n(gpt2-nano .*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=600
    )
    printed = {without_numbers(line) for line in done.stdout.splitlines()}
    for line in filter(None, shown.splitlines()):
        assert line == "..." or without_numbers(line) in printed, line
