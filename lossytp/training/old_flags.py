"""Translate the command lines of earlier studies, whose flags have other names or forms here, or no use.

`tests/training/test_old_command_lines.py` lists those command lines.
"""

import os
from collections.abc import Collection, Sequence

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
