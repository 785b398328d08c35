"""Configurations from the command line, and errors as users should see them: one line, exit code 2."""

import contextlib
import io
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import tyro

from lossytp.parallel.layout import rank_and_world_size
from lossytp.training.plain_yaml import read_yaml


def parse(kind: Any, description: str | None, arguments: list[str] | None = None) -> Any:
    """A `kind` (a configuration with `check_names`) from the arguments, those of this process when None.

    `--config FILE` reads a YAML file, or the configuration of a record; flags override it. `-` and `_` are alike.
    ValueError, in one line, for what is unknown, malformed, given twice or out of range.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    switches = {field.name for field in fields(kind) if isinstance(field.default, bool)}
    given = [_named(word, switches) for word in words if word.startswith("--")]
    for name in given:
        if given.count(name) > 1:
            raise ValueError(f"--{name} is given {given.count(name)} times: give it once")
    for word, value in pairwise(words):
        name = word.replace("-", "_").lstrip("_")
        if name in switches and value.lower() in ("true", "false"):
            raise ValueError(f"{word} {value}: a switch takes no value, give --{name} or --no-{name}")
    if "config" in given:
        words, file = _without_config(words)
        words += _as_flags(kind, _parameters_in(file), given=given)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=words, description=description)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise ValueError(_in_one_line(complaint.getvalue())) from None


SECONDS_TO_SPEAK = 2.0
NO_NUMBER = r"--\1 = \2 is no number: give one, such as 0.01"
NO_WHOLE_NUMBER = r"--\1 = \2 is no whole number: give one, such as 10"
CONNECTION_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def run_as_command(main: Callable[[], None]) -> None:
    """Run an entry point: a ValueError or a missing library ends it with one line on stderr and exit code 2.

    Where there are several processes, the line names the rank, torchrun's summary gets the error too, and what all of
    them would say alike is said once. Losing the connection to a process that ended is one line and exit code 1.
    """
    try:
        main()
    except KeyboardInterrupt:
        _leave(130)
    except (ValueError, ModuleNotFoundError) as error:
        _tell(str(error))
        _leave(2)
    except Exception as error:
        if "RANK" not in os.environ:
            raise
        if any(sign in str(error) for sign in CONNECTION_LOST):
            reason = str(error).splitlines()[0]
            _tell(f"the connection to another process is lost: see why that one ended ({reason})", consequence=True)
        else:
            traceback.print_exc()
            _tell(f"{type(error).__name__}: {error}")
        _leave(1)
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End this process; one of several at once: Gloo's threads outlive their group, and a tensor that one still holds
    aborts the process while Python is taken down, so that now and then a finished run would fail (pytorch#179291).
    """
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _tell(message: str, *, consequence: bool = False) -> None:
    """Print the error, after this process's rank where it is one of several, and leave it for torchrun's summary.

    torchrun calls the earliest the root cause, in whole seconds: a `consequence` of another's is a second later.
    """
    rank, second = os.environ.get("RANK"), int(time.time()) + consequence
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        content = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(second)}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": content}), encoding="utf-8")
    initialize = sys.modules.get("lossytp.parallel.initialize")
    apart = initialize is not None and initialize.joined()  # before, all processes of a node fail alike
    if rank is None or apart or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"rank {rank}: error: {message}" if rank else f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_TO_SPEAK)  # torchrun ends all processes once the first one has ended


def _named(word: str, switches: set[str]) -> str:
    """The parameter that a flag sets: a switch has two flags, --name and --no-name."""
    name = word.split("=")[0].removeprefix("--").replace("-", "_")
    return name.removeprefix("no_") if name.removeprefix("no_") in switches else name


def _without_config(words: list[str]) -> tuple[list[str], Path]:
    for position, word in enumerate(words):
        if word.startswith("--config="):
            return words[:position] + words[position + 1 :], Path(word.removeprefix("--config="))
        if word == "--config":
            if position + 1 == len(words):
                break
            return words[:position] + words[position + 2 :], Path(words[position + 1])
    raise ValueError("--config names no file: give the path of a YAML file")


def _as_flags(kind: Any, values: dict, *, given: list[str]) -> list[str]:
    """Return the values as flags, without those `given` and without a null that is the default too.

    Raises:
        ValueError: for an unknown name, and for a value of another type than the parameter's.
    """
    kind.check_names(values)
    defaults = {field.name: field.default for field in fields(kind)}
    words = []
    for name, value in values.items():
        if value is defaults[name] is None or name in given:
            continue
        kind.check_type(name, value)  # as a flag every value would be text: a list would name a folder
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name}={value}")  # one word: a value may look like a flag
    return words


def _parameters_in(file: Path) -> dict:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--config {file} cannot be read ({error.strerror}): give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {file} is not UTF-8 ({error}): save it as UTF-8") from error
    try:
        values = read_yaml(text)
    except ValueError as error:
        raise ValueError(f"--config {file} {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--config {file} holds no parameters: write one 'name: value' a line")
    if not isinstance(values.get("config"), dict):
        return values
    processes, started = values.get("processes", 1), rank_and_world_size()[1]  # a record has both
    if processes != started:
        raise ValueError(
            f"--config {file} is the record of {processes} processes, and here {started} run: "
            f"start it with torchrun --nproc_per_node {processes} -m"
        )
    return values["config"]


def _in_one_line(box: str) -> str:
    """The text of the box that tyro draws around a complaint, without the box and its advertising of --help."""
    words = re.sub(r"[│╭╮╰╯─]|-{5,}", " ", box).split()  # lines of hyphens where the terminal has ASCII alone
    text = " ".join(words).removeprefix("Parsing error ").removeprefix("Unrecognized options ")
    text = re.sub(
        r"^Value error |^Invalid choice |Error parsing \w+: | Argument helptext:.*|\s*For full helptext,.*",
        "",
        text,
    )
    text = re.sub(r"Error parsing --([\w-]+): could not convert string to float: (.*)", NO_NUMBER, text)
    text = re.sub(r"Error parsing --([\w-]+): invalid literal for int\(\) with base 10: (.*)", NO_WHOLE_NUMBER, text)
    return text or "the arguments were not understood: see --help"
