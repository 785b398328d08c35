import subprocess
import sys

from lossytp.probe.__main__ import COMMANDS


def probe(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "lossytp.probe", *words], capture_output=True, text=True, check=False, timeout=60
    )


def test_help_lists_the_commands() -> None:
    done = probe()
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)


def test_an_unknown_command_is_refused_in_one_line() -> None:
    done = probe("sned")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: command = 'sned' is unknown: choose one of {', '.join(COMMANDS)}\n"


def test_help_of_a_command_names_it() -> None:
    assert probe("fit", "--help").stdout.startswith("usage: python -m lossytp.probe fit ")
