"""Read configurations from the command line, and show users errors in one line, with exit code 2."""

import argparse
import io
import json
import os
import select
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError

from lossytp.network.bounded_files import content_of
from lossytp.network.checks import check_names, printable, refuse_if
from lossytp.parallel.group import rank_and_world_size
from lossytp.training.settings import OBSOLETE, Settings, without_obsolete

# Flags of earlier studies, as in `tests/training/test_old_command_lines.py`.
RENAMED = {"eval_interval": "eval_steps"}
BARE = {"gradient_clipping": "1.0"}  # the value of a flag that stands alone
IMPLIED = {"patience": {"eval_steps": 20}, "target_accuracy": {"eval_steps": 20}}  # the studies' default
REFUSED = {name: f"{instead}; leave it out" for name, (_, instead) in OBSOLETE.items()} | {
    "teacher_device_map": "no teacher model is loaded here, so there is none to place: leave it out"
}

GO_WITH_DATASET = ("declaration", "task_folder")  # a file's are dropped if the command line names another task
SECONDS_TO_SPEAK = 2.0
UNREAD = 141  # a shell's code for a process that SIGPIPE ended
CONNECTION_LOST = ("Connection closed by peer", "Connection reset by peer", "was likely closed", "Broken pipe")


class _Constructor(SafeConstructor):
    """Keep dates as text: they name folders."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", lambda constructor, node: node.value)


def read_yaml(text: str) -> Any:
    """Return the content of a document in YAML 1.2, where `no` and `1:30` are text and 1e-3 is a number.

    Raises:
        ValueError: if the text is not YAML, or a mapping has a key twice.
    """
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    try:
        return reader.load(text)
    except (YAMLError, RecursionError, ValueError) as error:
        reason = getattr(error, "problem", None) or str(error)
        mark = getattr(error, "problem_mark", None)
        fix = f"mend line {mark.line + 1}" if mark else "write one 'name: value' a line"
        raise ValueError(f"cannot be read as YAML ({printable(' '.join(reason.split()))}): {fix}") from error


def read_yaml_file(name: str, file: Path) -> Any:
    """Return the content of a YAML file; raise ValueError, with a message that begins with `name`, if it has none."""
    try:
        return read_yaml(content_of(file).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 at byte {error.start}: save it as UTF-8") from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def parse(kind: type[Any], description: str | None, arguments: Sequence[str] | None = None) -> Any:
    """Return a configuration read from command-line arguments.

    `--config FILE` reads a YAML file, or the configuration of a record; flags override it. Flags may be written with
    `-` or `_`, and as earlier studies wrote them.

    Args:
        kind: the configuration's class, a subclass of `Settings`.
        description: text for --help.
        arguments: the arguments; this process's if None.

    Raises:
        ValueError: if an argument is unknown, malformed, given twice or out of range.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in words or "-h" in words:
        _help(kind, _program(arguments), description)
        sys.exit(0)
    fields, given = dict(kind.flat_fields()), dict[str, Any]()
    flags, rest = _flags(kind, words)
    value: Any
    for name, text in flags:
        if name == "local_rank":
            _take_local_rank(text or "")
            continue
        if name in REFUSED and name not in fields:
            raise ValueError(f"--{name} is not supported: {REFUSED[name]}")
        name = RENAMED[name] if RENAMED.get(name) in fields else name
        switch = name.removeprefix("no_")
        if switch in fields and fields[switch].annotation is bool:
            if text is not None:
                raise ValueError(f"--{name} is a switch and takes no value: give --{switch} or --no-{switch}")
            name, value = switch, switch == name
        else:
            check_names([name], [*fields, "config"])
            if (text := BARE.get(name) if text is None else text) is None:
                raise ValueError(f"--{name} has no value: give one")
            value = text if name == "config" else kind.as_flag_value(name, text)
        if name in given:
            raise ValueError(f"--{name} is given twice: give it once")
        given[name] = value
    if rest:
        raise ValueError(f"{printable(rest[0])} belongs to no flag: write --NAME before a value, none after a switch")
    values = _parameters_in(kind, Path(given.pop("config")), given) if "config" in given else {}
    for name in given.keys() & IMPLIED.keys():
        values = {each: value for each, value in IMPLIED[name].items() if each in fields} | values
    return kind(**{**values, **given})


def split_at_program(kind: type[Settings], words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line before its first word that is neither a flag nor a flag's value: a program, or -m."""
    rest = _flags(kind, words)[1]
    return list(words[: len(words) - len(rest)]), rest


def _flags(kind: type[Settings], words: Sequence[str]) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Return the name of each flag, with its text, if any, and the words from the first that belongs to no flag."""
    switches = {name for name, field in kind.flat_fields() if field.annotation is bool}
    found, rest = [], list(words)
    while rest and (rest[0].startswith("--") or rest[0] == "-h"):
        flag, equals, text = rest.pop(0).partition("=")
        name = flag.lstrip("-").replace("-", "_")
        alone = name.removeprefix("no_") in {*switches, "", "help", "h"} or not rest or rest[0].startswith("--")
        if flag != "--":
            found.append((name, text if equals else None if alone else rest.pop(0)))
    return found, rest


def _take_local_rank(value: str) -> None:
    """Set LOCAL_RANK to the number that an older launcher gives as a flag, unless it is set already."""
    wrong = not value.removeprefix("-").isdecimal()
    refuse_if(wrong, "--local_rank", value, "is not a whole number: leave it out, as torchrun sets LOCAL_RANK")
    if int(value) >= 0 and "RANK" in os.environ:
        os.environ.setdefault("LOCAL_RANK", value)


def _help(kind: type[Settings], program: str, description: str | None) -> None:
    """Print the flags, by groups, with their defaults."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [-h] [OPTIONS]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="A YAML file with settings, or a record; flags override it.")
    section_of = dict.fromkeys(kind.known(), parser.add_argument_group("settings"))
    for group in kind.groups().values():
        section = parser.add_argument_group((group.__doc__ or "").splitlines()[0].rstrip("."))
        section_of |= dict.fromkeys(group.known(), section)
    for name, field in kind.flat_fields():
        default = "" if field.is_required() else f" (default: {field.default})"
        text = f"{' '.join((field.description or '').split())}{default}".replace("%", "%%")
        if field.annotation is bool:
            section_of[name].add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=text)
            continue
        kinds = (field.annotation, *get_args(field.annotation))
        choices = next((get_args(each) for each in kinds if get_origin(each) is Literal), ())
        types = [getattr(each, "__origin__", each) for each in kinds]
        metavar = "|".join(choices) or next(each.__name__.upper() for each in types if isinstance(each, type))
        section_of[name].add_argument(f"--{name}", metavar=metavar, help=text)
    parser.print_help()


class Parser(argparse.ArgumentParser):
    """Raise a ValueError of one line, for `run_as_command`, where argparse prints the usage too."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: --help lists what it takes")


def _program(arguments: Sequence[str] | None) -> str:
    """Return the command as a user types it, such as "python -m lossyprobe send", for --help."""
    started = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {started.name.removesuffix('.__main__')}" if started else Path(sys.argv[0]).name
    command = [] if arguments is None else sys.argv[1:2]  # a subcommand has the arguments after it
    return " ".join([program, *command])


def run_as_command(main: Callable[[], None]) -> None:
    """Run an entry point. Report a ValueError or a missing library in one line on stderr, with exit code 2.

    Under torchrun the line names the rank, and torchrun's summary shows it too. An error that all processes share is
    shown once. A lost connection to another process is reported in one line, with exit code 1. If nobody reads the
    output any more, as with `| head`, the process ends silently, with exit code 141. Characters that the terminal
    cannot show, such as those of a folder's name, are printed as escapes.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except SystemExit as stop:  # --help
        if stop.code:
            raise
    except KeyboardInterrupt:
        _leave(130)
    except (ValueError, ModuleNotFoundError) as error:
        refuse(error)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            _leave(UNREAD)
        if "RANK" not in os.environ:
            raise
        message = f"{type(error).__name__}: {error}"
        lost = any(sign in message for sign in CONNECTION_LOST)
        if lost:
            reason = str(error).splitlines()[0]
            message = f"the connection to another process is lost: see why that one ended ({reason})"
        else:
            traceback.print_exc()
        _tell(message, consequence=lost)
        _leave(1)
    _leave(UNREAD if _reader_left() else 0)


def refuse(error: Exception) -> NoReturn:
    """Report an error of the user's in one line, and end with exit code 2."""
    _tell(printable(error, 10_000))
    _leave(2)


def _reader_left() -> bool:
    """Return whether the output, and not another pipe, has lost its reader; then drop what Python would still flush."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    unread = [number for number, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for number in unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return bool(unread)


def _leave(code: int) -> NoReturn:
    """End this process with an exit code. Under torchrun, skip Python's own shutdown.

    Gloo's threads outlive their process group. If one still holds a tensor while Python shuts down, the process aborts,
    and a finished run seems to have failed (pytorch#179291).
    """
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _tell(message: str, *, consequence: bool = False) -> None:
    """Print an error, with this process's rank under torchrun, and write it to the file for torchrun's summary.

    torchrun calls the earliest error the root cause, and compares whole seconds. So an error that is a `consequence` of
    another process's error is dated one second later.
    """
    rank, second = os.environ.get("RANK"), int(time.time()) + consequence
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        content = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(second)}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": content}), encoding="utf-8")
    initialize = sys.modules.get("lossytp.parallel.backend")
    # until they join, all processes that torchrun starts on a node fail alike
    apart = "TORCHELASTIC_RUN_ID" not in os.environ or (initialize is not None and initialize.joined())
    if rank is None or apart or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"rank {rank}: error: {message}" if rank else f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_TO_SPEAK)  # torchrun ends all processes as soon as one ends: let local rank 0 print first


def _parameters_in(kind: type[Settings], file: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a YAML file or a record, to which the flags `given` are added."""
    values = read_yaml_file(f"--config {file}", file)
    if not isinstance(values, dict):
        raise ValueError(f"--config {file} holds no parameters: write one 'name: value' a line")
    if isinstance((record := values).get("config"), dict):
        started = rank_and_world_size()[1]
        processes = record.get("processes", started)  # an evaluation or a lab writes none
        if processes != started:
            what = f"is the record of a run on {processes} processes, not {started}"
            raise ValueError(f"--config {file} {what}: start it with torchrun --nproc_per_node {processes} -m")
        weights = record.get("first_weights")
        if weights and "checkpoint_path" not in given:
            what = f"{weights['file']} (sha256 {weights['sha256'][:8]}...)"
            raise ValueError(f"--config {file} began from the weights {what}: give their path as --checkpoint_path")
        values = record["config"] | {name: record[name] for name in ("task_folder",) if name in record}
    values = {name: value for name, value in values.items() if "dataset" not in given or name not in GO_WITH_DATASET}
    try:
        check_names(without_obsolete(values), kind.known())
    except ValueError as error:
        raise ValueError(f"--config {file}: {error}") from error
    return values
