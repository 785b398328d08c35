"""Wait for measurements that other machines start with `python -m lossytp.probe send`.

python -m lossytp.probe receive                   # accept this machine only
python -m lossytp.probe receive --host 10.0.0.2   # accept every machine that reaches this address

Stop it when you have finished measuring. It only answers, and never sends more bytes than it has received.
"""

import sys
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import Field

from lossytp.probe.measure import Limits, serve, summary_lines
from lossytp.probe.send import write_new_trace
from lossytp.probe.wire import PATIENCE_S, PORT
from lossytp.training.command_line import parse
from lossytp.training.files import check_writable
from lossytp.training.settings import Count, Positive, Settings


class ReceiveConfig(Settings):
    """The settings of the command `receive`."""

    host: str = "127.0.0.1"
    """Address of this machine to listen on; 0.0.0.0 listens on all."""
    port: Annotated[int, Field(ge=1, lt=2**16)] = PORT
    """TCP and UDP port to listen on."""
    max_mbits: Positive = 100.0
    """Refuse measurements that send faster than this in one direction."""
    max_packets: Count = Limits().max_packets
    """Refuse measurements that send more packets than this in one direction, because they take more memory."""
    measurements: Count | None = None
    """Exit after this many measurements. If left out, wait until Ctrl-C."""
    patience_s: Positive = PATIENCE_S
    """End a measurement early if its partner is silent for this many seconds."""
    output_dir: str | None = None
    """Folder for traces of the packets received. If left out, only the sender writes a trace."""


def main(words: list[str]) -> None:
    """Take part in measurements, and print a summary of each."""
    config: ReceiveConfig = parse(ReceiveConfig, __doc__, words)
    if config.output_dir is not None:
        check_writable(config.output_dir)
    limits = Limits(config.max_mbits, config.max_packets)
    measurements = serve(config.host, config.port, limits=limits, patience_s=config.patience_s, say=_say)
    for trace, ended_early in islice(measurements, config.measurements):
        print(*summary_lines(trace), sep="\n", flush=True)
        if ended_early:
            _say(f"the measurement ended early because {ended_early}: the summary covers what is known")
        if config.output_dir is not None:
            print(f"see {write_new_trace(Path(config.output_dir), trace)}", flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
