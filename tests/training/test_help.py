"""The help text of a command."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["lossytp.train", "lossytp.tolerance"])
def test_help_names_the_command_as_it_is_typed_and_gives_each_example_a_line(module):
    shown = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True).stdout
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0] == f"usage: python -m {module} [-h] [OPTIONS]"
    examples = [line for line in lines if line.startswith(f"python -m {module} ")]
    assert len(examples) == 2
    assert "NONETYPE" not in shown
    assert ".:" not in shown
    assert all(line.count("python -m") == 1 for line in examples)
