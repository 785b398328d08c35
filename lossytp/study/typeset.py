"""Compile the paper: `python -m lossytp.study.typeset paper/lossytp.typ OUTPUT.pdf --results results/laptop`."""

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

import typst

from lossytp.training.command_line import run_as_command


def typeset(source: Path, output: Path, results: Path) -> None:
    """Compile `source` to a PDF, which appears only once it is complete.

    Paths are relative to the working folder. The paper may read files below that folder only.

    Args:
        source: the Typst file.
        output: the PDF.
        results: the folder that the paper reads its numbers and figures from.

    Raises:
        ValueError: if the text has an error, or `output` cannot be a file.
    """
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"{output} is a folder, or its folder does not exist: give a file in an existing folder")
    part = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        typst.compile(
            source,
            output=part,
            root=Path.cwd(),
            sys_inputs={"results": f"/{results.as_posix()}"},
            timestamp=datetime(2026, 1, 1, tzinfo=UTC),  # equal text and results give equal files
        )
    except RuntimeError as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from error
    part.replace(output)


def main() -> None:
    """Compile the paper as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    typeset(arguments.source, arguments.output, arguments.results)


if __name__ == "__main__":
    run_as_command(main)
