"""Configurations from the command line, and errors as users should see them: one line, exit code 2."""

import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro
import yaml


def parse(kind: Any, description: str | None, arguments: list[str] | None = None) -> Any:
    """A `kind` (a configuration with `from_dict`) from the arguments, those of this process when None.

    `--config FILE` reads a YAML file; flags override it. `-` and `_` are alike in flags. ValueError, in one line,
    for what is unknown, malformed, given twice or out of range.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    flags = [word.split("=")[0].replace("-", "_") for word in words if word.startswith("--")]
    for flag in flags:
        if flags.count(flag) > 1:
            raise ValueError(f"--{flag.strip('_')} is given {flags.count(flag)} times: give it once")
    defaults = {}
    if "__config" in flags:
        words, file = _without_config(words)
        defaults = _read_yaml(file)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=words, default=kind.from_dict(defaults), description=description)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise ValueError(_in_one_line(complaint.getvalue())) from None


def run_as_command(main: Callable[[], None]) -> None:
    """Run an entry point: a ValueError or a missing library ends it with one line on stderr and exit code 2."""
    try:
        main()
    except (ValueError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _without_config(words: list[str]) -> tuple[list[str], Path]:
    for position, word in enumerate(words):
        if word.startswith("--config="):
            return words[:position] + words[position + 1 :], Path(word.removeprefix("--config="))
        if word == "--config":
            if position + 1 == len(words):
                break
            return words[:position] + words[position + 2 :], Path(words[position + 1])
    raise ValueError("--config names no file: give the path of a YAML file")


def _read_yaml(file: Path) -> dict:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {file} cannot be read ({error.strerror}): give the path of a YAML file") from error
    except yaml.YAMLError as error:
        raise ValueError(f"--config {file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--config {file} holds no parameters: write one 'name: value' a line")
    return values


def _in_one_line(box: str) -> str:
    """The text of the box that tyro draws around a complaint, without the box and its advertising of --help."""
    words = re.sub(r"[│╭╮╰╯─]", " ", box).split()
    text = " ".join(words).removeprefix("Parsing error ").removeprefix("Unrecognized options ")
    text = re.sub(
        r"^Value error |^Invalid choice |Error parsing TrainConfig: | Argument helptext:.*|\s*For full helptext,.*",
        "",
        text,
    )
    return text or "the arguments were not understood: see --help"
