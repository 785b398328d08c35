"""Read configurations from the command line, and show users errors in one line, with exit code 2."""

import contextlib
import io
import json
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, get_args

import tyro
import yaml

from lossytp.network.bounded_files import content_of
from lossytp.network.checks import check_names, printable
from lossytp.parallel.group import rank_and_world_size

# Translate the command lines of earlier studies, whose flags have other names or forms here, or no use.
#
# `tests/training/test_old_command_lines.py` lists those command lines.


RENAMED = {"eval_interval": "eval_steps"}
BARE = {"gradient_clipping": "1.0"}  # the value of a flag that stands alone
IMPLIED = {"patience": ("eval_steps", "20"), "target_accuracy": ("eval_steps", "20")}  # the studies' default
REFUSED = {"teacher_device_map": "no teacher model is loaded here, so there is none to place: leave it out"}


def without_old_flags(words: Sequence[str], known: Collection[str]) -> list[str]:
    """Return a command line in which every flag of an earlier study is one of today's.

    Args:
        words: the arguments.
        known: the names of today's parameters. A name among them keeps its own meaning.

    Raises:
        ValueError: if a flag has no counterpart; the message says why.
    """
    read, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        alone = not rest or rest[0].startswith("--")
        if not word.startswith("--") or (name in known and name not in BARE):
            read.append(word)
        elif name in REFUSED:
            raise ValueError(f"{word} is not supported: {REFUSED[name]}")
        elif name == "local_rank":
            _take_local_rank(value if equals else "" if alone else rest.pop(0))
        elif name in BARE and name in known and not equals and alone:
            read.append(f"--{name}={BARE[name]}")
        elif RENAMED.get(name) in known:
            read.append(f"--{RENAMED[name]}{equals}{value}")
        else:
            read.append(word)
    return read


def implied_flags(given: Collection[str], known: Collection[str]) -> list[str]:
    """Return the flags that others imply, as in the earlier studies, unless they are given."""
    implied = {IMPLIED[name] for name in given if name in IMPLIED}
    return [f"--{name}={value}" for name, value in sorted(implied) if name in known and name not in given]


def _take_local_rank(value: str) -> None:
    """Set LOCAL_RANK to the number that an older launcher gives as a flag, unless it is set already."""
    if not value.removeprefix("-").isdecimal():
        raise ValueError(
            f"--local_rank = {value!r} is not a whole number: leave it out, because torchrun sets LOCAL_RANK"
        )
    if int(value) >= 0 and "RANK" in os.environ:
        os.environ.setdefault("LOCAL_RANK", value)


# Read YAML by the rules of YAML 1.2, which take plain words at face value.
#
# PyYAML follows YAML 1.1, in which 010 is eight, 1:30 is ninety, 1e-3 is text, no is false and 2024-01-01 is a date.


def read_yaml(text: str) -> Any:
    """Return the content of a YAML document.

    Plain words are null, true, false, decimal numbers or text (YAML 1.2, section 10.3.2, without hexadecimals).

    Raises:
        ValueError: if the text is not YAML, or a mapping has a key twice.
    """
    try:
        return yaml.load(text, _PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"cannot be read as YAML: {' '.join(str(error).split())}") from error


def read_yaml_file(name: str, file: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        ValueError: if the file cannot be read, or is not YAML; the message begins with `name`.
    """
    try:
        text = content_of(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 ({error}): save it as UTF-8") from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    try:
        return read_yaml(text)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


class _PlainLoader(yaml.SafeLoader):
    """Read plain words by YAML 1.2, and refuse duplicate keys in a mapping.

    PyYAML would keep the last of two equal keys, and silently drop the first one's value.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # "<<" merges another mapping in
        keys = [self.construct_object(key, deep=True) for key in own]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"key {key!r} is given twice in one mapping: leave one out")
        return super().construct_mapping(node, deep)

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        try:
            return int(text)
        except ValueError as error:
            raise ValueError(f"{text[:40]!r} is not a valid decimal number: write one, such as 10") from error


_WORDS = {
    "null": (r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}
_PlainLoader.yaml_implicit_resolvers = {}  # none of YAML 1.1's
for _kind, (_pattern, _beginnings) in _WORDS.items():
    _PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), _beginnings)
_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_decimal)


def parse(kind: Any, description: str | None, arguments: list[str] | None = None) -> Any:
    """Return a configuration read from command-line arguments.

    `--config FILE` reads a YAML file, or the configuration of a record; flags override it. Flags may be written with
    `-` or `_`, and as earlier studies wrote them (`old_flags`).

    Args:
        kind: the configuration's class.
        description: text for --help.
        arguments: the arguments; this process's if None.

    Raises:
        ValueError: if an argument is unknown, malformed, given twice or out of range.
    """
    known = [field.name for field in fields(kind)]
    types = {field.name: get_args(field.type) for field in fields(kind)}
    words = without_old_flags(sys.argv[1:] if arguments is None else arguments, known)
    switches = {field.name for field in fields(kind) if isinstance(field.default, bool)}
    given = [_named(word, switches) for word in words if word.startswith("--")]
    check_names([name for name in given if name not in NO_PARAMETERS], known)
    for name in given:
        if given.count(name) > 1:
            raise ValueError(f"--{name} is given {given.count(name)} times: give it once")
    for place, (word, following) in enumerate(pairwise([*words, ""])):
        flag, equals, value = word.partition("=")
        name = flag.replace("-", "_").lstrip("_")
        value = value if equals else following
        if value.lower() == "none" and type(None) in types.get(name, ()) and str not in types[name]:
            words[place + (not equals)] = f"{flag}=None" if equals else "None"  # tyro knows one spelling
        if flag.startswith("--") and name in switches and (equals or value.lower() in ("true", "false")):
            raise ValueError(f"{flag} is a switch and takes no value, not {value}: give --{name} or --no-{name}")
    if "config" in given:
        words, file = _without_config(words)
        replaced = [*given, *GO_WITH_DATASET] if "dataset" in given else given
        words += _as_flags(kind, _parameters_in(file, given), given=replaced)
    words += implied_flags([_named(word, switches) for word in words if word.startswith("--")], known)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=words, prog=_program(arguments), description=_with_examples_apart(description))
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        refused = stop.__context__  # by the configuration itself; tyro would break long words of its message
        told = str(refused) if type(refused) is ValueError else _in_one_line(complaint.getvalue())
        raise ValueError(told) from None


def _program(arguments: list[str] | None) -> str:
    """Return the command as a user types it, such as "python -m lossytp.probe send", for --help."""
    started = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {started.name.removesuffix('.__main__')}" if started else Path(sys.argv[0]).name
    command = [] if arguments is None else sys.argv[1:2]  # a subcommand has the arguments after it
    return " ".join([program, *command])


def _with_examples_apart(description: str | None) -> str | None:
    """Return the description with a blank line before each command, so that --help gives it a line of its own."""
    return description and re.sub(r"\n+(?=(?:python|torchrun) )", "\n\n", description)


NO_PARAMETERS = ("config", "help", "")  # flags that every command has; "--" ends them
GO_WITH_DATASET = ("declaration", "task_folder")  # a file's are dropped if the command line names another task
SECONDS_TO_SPEAK = 2.0
UNREAD = 141  # a shell's code for a process that SIGPIPE ended
NO_NUMBER = r"--\1 = \2 is not a number: give one, such as 0.01"
NO_WHOLE_NUMBER = r"--\1 = \2 is not a whole number: give one, such as 10"
READABLE = {  # tyro's messages, and what to say instead
    r"Error parsing --([\w-]+): no type matching \{None\}\|FLOAT .* from \['(.*?)'\].*": NO_NUMBER,
    r"Error parsing --([\w-]+): no type matching \{None\}\|INT .* from \['(.*?)'\].*": NO_WHOLE_NUMBER,
    r"Error parsing --([\w-]+): could not convert string to float: (.*)": NO_NUMBER,
    r"Error parsing --([\w-]+): invalid literal for int\(\) with base 10: (.*)": NO_WHOLE_NUMBER,
    r"^Unrecognized options:? (\S+).*": r"\1 belongs to no flag: see --help",
    r"Missing argument .*argument '--([\w-]+)'.*": r"--\1 has no value: give one",
    r"invalid choice (.*) for argument '--([\w-]+)'. Expected one of \((.*)\)\.?": r"--\2 = \1 is unknown: choose \3",
}
CONNECTION_LOST = ("Connection closed by peer", "Connection reset by peer", "was likely closed", "Broken pipe")


def run_as_command(main: Callable[[], None]) -> None:
    """Run an entry point. Report a ValueError or a missing library in one line on stderr, with exit code 2.

    Under torchrun the line names the rank, and torchrun's summary shows it too. An error that all processes share is
    shown once. A lost connection to another process is reported in one line, with exit code 1. If nobody reads the
    output any more, as behind `| head`, the process ends silently, with exit code 141. Characters that the terminal
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
        _tell(printable(error, 10_000))
        _leave(2)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            _unread_dropped()
            _leave(UNREAD)
        if "RANK" not in os.environ:
            raise
        if any(sign in str(error) for sign in CONNECTION_LOST):
            reason = str(error).splitlines()[0]
            _tell(f"the connection to another process is lost: see why that one ended ({reason})", consequence=True)
        else:
            traceback.print_exc()
            _tell(f"{type(error).__name__}: {error}")
        _leave(1)
    _leave(UNREAD if _unread_dropped() else 0)


def _reader_left() -> bool:
    """Return whether this process's output, and not another pipe, has lost its reader."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _unread_dropped() -> bool:
    """Flush the output; drop what nobody reads, and return whether there was any.

    A closed pipe may be noticed only as the output is flushed. Python would flush again at its end, and complain.
    """
    unread = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            unread = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return unread


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


def _named(word: str, switches: set[str]) -> str:
    """Return the parameter that a flag sets. A switch has two flags, --name and --no-name."""
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
    """Return the values as flags, except for names already `given` and for nulls that are the default.

    Raises:
        ValueError: if a name is unknown, or a value has another type than its parameter.
    """
    kind.check_names(values)
    defaults = {field.name: field.default for field in fields(kind)}
    words = []
    for name, value in values.items():
        if value is defaults[name] is None or name in given:
            continue
        kind.check_type(name, value)  # a flag would turn any value into text: a list could become a folder's name
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            text = json.dumps(value) if isinstance(value, dict) else value
            words.append(f"--{name}={text}")  # in one word, since a value may look like a flag
    return words


def _parameters_in(file: Path, given: list[str]) -> dict:
    values = read_yaml_file(f"--config {file}", file)
    if not isinstance(values, dict):
        raise ValueError(f"--config {file} holds no parameters: write one 'name: value' a line")
    if not isinstance(values.get("config"), dict):
        return values
    started = rank_and_world_size()[1]
    processes = values.get("processes", started)  # the file is a record, or what an evaluation or a lab wrote
    if processes != started:
        raise ValueError(
            f"--config {file} is the record of a run on {processes} processes, not {started}: "
            f"start it with torchrun --nproc_per_node {processes} -m"
        )
    weights = values.get("first_weights")
    if weights and "checkpoint_path" not in given:
        raise ValueError(
            f"--config {file} is the record of a run that began from the weights {weights['file']} (sha256 "
            f"{weights['sha256'][:8]}...): give their path as --checkpoint_path"
        )
    return values["config"] | {name: values[name] for name in ("task_folder",) if name in values}


def _in_one_line(box: str) -> str:
    """Return the text of an error that tyro prints in a box, without the box and the hint at --help."""
    words = re.sub(r"[│╭╮╰╯─]|-{5,}", " ", box).split()  # an ASCII terminal shows lines of hyphens
    text = " ".join(words).removeprefix("Parsing error ").removeprefix("Unrecognized options ")
    text = re.sub(
        r"^Value error |^Invalid choice |Error parsing \w+: | Argument helptext:.*|\s*For full helptext,.*",
        "",
        text,
    )
    for pattern, message in READABLE.items():
        text = re.sub(pattern, message, text)
    return text or "the arguments were not understood: see --help"
