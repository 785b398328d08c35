"""Measure the packet losses of a real network.

python -m lossyprobe receive --host 10.0.0.2         wait for packets on one machine
python -m lossyprobe send 10.0.0.2 --packets 200000  send packets from another, and write a trace of the losses
python -m lossyprobe fit TRACE                       fit a loss process, for tc netem and --loss_type
python -m lossyprobe report TRACE                    estimate what these losses cost your model
python -m lossyprobe import FILE                     turn losses that another program recorded into a trace

Add --help to a command to see its flags.
"""

import sys

from lossytp.network.checks import check_known
from lossytp.training.command_line import run_as_command


def main() -> None:
    """Run the command that the first word names."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return
    from lossyprobe.commands import COMMANDS

    check_known("command", words[0], COMMANDS)
    COMMANDS[words[0]](words[1:])


if __name__ == "__main__":
    run_as_command(main)
