"""Send numbered packets to a machine that runs `python -m lossytp.probe receive`, and report which were lost.

python -m lossytp.probe send                                       # to this machine itself
python -m lossytp.probe send 10.0.0.2 --packets 200000 --flows 3 --both_directions
"""

import itertools
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator
from tqdm import tqdm

from lossytp.network.traces import ProbeTrace, write_trace
from lossytp.probe.measure import measure, summary_lines
from lossytp.probe.wire import PATIENCE_S, PORT, Plan
from lossytp.training.command_line import parse
from lossytp.training.files import check_writable, saving
from lossytp.training.settings import Count, Positive, Settings


class SendConfig(Settings):
    """The settings of the command `send`."""

    host: str = "127.0.0.1"
    """Name or IPv4 address of the receiving machine. The command's first word may give it."""
    port: Annotated[int, Field(ge=1, lt=2**16)] = PORT
    """TCP and UDP port of the receiver."""
    packets: Count = 10_000
    """Number of packets to send in each flow."""
    flows: Count = 1
    """Number of flows to send at once, each from its own port, as a rank sends to its peers."""
    packet_bytes: Count = 1500
    """Bytes per packet, including the headers of IP (20), UDP (8) and this program (16)."""
    rate: Positive = 1000.0
    """Packets per second in each flow."""
    burst_packets: Count = 1
    """Packets to send back to back, as collectives do. The mean rate does not change."""
    both_directions: bool = False
    """Let the receiver send as many packets back at the same time."""
    max_mbits: Positive = 100.0
    """Refuse to send faster than this over all flows. Raise it if the network has room for more."""
    patience_s: Positive = PATIENCE_S
    """End the measurement early if the receiver is silent for this many seconds."""
    output_dir: str = "output/probe"
    """Folder for the trace, whose name is the date and time."""

    @model_validator(mode="after")
    def _check_send(self) -> Self:
        self.plan().check_rate(self.max_mbits)
        return self

    def plan(self) -> Plan:
        """Return the plan of the measurement."""
        return Plan(
            packets=self.packets,
            flows=self.flows,
            packet_bytes=self.packet_bytes,
            rate_packets_per_s=self.rate,
            burst_packets=self.burst_packets,
            both_directions=self.both_directions,
        )


def main(words: list[str]) -> None:
    """Measure, print a summary, and write the trace."""
    if words and not words[0].startswith("-"):
        words = ["--host", *words]
    config: SendConfig = parse(SendConfig, __doc__, words)
    check_writable(config.output_dir)
    plan = config.plan()
    with tqdm(total=plan.flows * plan.packets, unit="packet", leave=False, disable=not sys.stderr.isatty()) as bar:

        def show(sent: int, arrived: int) -> None:
            bar.set_postfix(missing=sent - arrived, refresh=False)
            bar.update(sent - bar.n)

        trace, ended_early = measure(plan, config.host, config.port, patience_s=config.patience_s, watch=show)
    path = write_new_trace(Path(config.output_dir), trace)
    print(*summary_lines(trace), sep="\n")
    if ended_early:
        print(f"the measurement ended early because {ended_early}: the summary covers what is known", file=sys.stderr)
    print(f"see {path}")


def write_new_trace(folder: Path, trace: ProbeTrace) -> Path:
    """Write a trace to a new file, named by the date and time, and return its path.

    Raises:
        ValueError: if the file cannot be written.
    """
    name = f"trace_{time.strftime('%Y%m%d_%H%M%S')}"
    for again in itertools.count(1):
        path = folder / (f"{name}.parquet" if again == 1 else f"{name}_{again}.parquet")
        with saving(path), suppress(FileExistsError):
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("xb"):  # fails if the other end has just made it
                break
    try:
        with saving(path):
            write_trace(path, trace)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path
