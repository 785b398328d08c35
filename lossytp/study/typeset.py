"""Compile the paper: `python -m lossytp.study.typeset paper/lossytp.typ OUTPUT.pdf --results results/laptop`."""

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

import typst

from lossytp.training.command_line import run_as_command


def typeset(source: Path, output: Path, results: Path) -> None:
    """Compile `source`, which reads its numbers and figures below `results`, to a PDF that appears whole.

    Paths are relative to the working folder, the root of what the paper may read. ValueError says where the text is
    wrong, or that `output` cannot be a file.
    """
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"{output} is a folder, or in none that is there: give a file's path")
    part = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        typst.compile(
            source,
            output=part,
            root=Path.cwd(),
            sys_inputs={"results": f"/{results.as_posix()}"},
            timestamp=datetime(2026, 1, 1, tzinfo=UTC),  # one text and one set of results give one file
        )
    except RuntimeError as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from error
    part.replace(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    typeset(arguments.source, arguments.output, arguments.results)


if __name__ == "__main__":
    run_as_command(main)
